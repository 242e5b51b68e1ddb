"""What can go wrong, as a small family. A message is one sentence that says what is wrong and what would be right."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path


class PolyfedError(Exception):
    """Base of every error that polyfed raises on purpose; the command line prints it as one sentence."""

    exit_status = 1


class InputError(PolyfedError):
    """The caller asked for something impossible: an unknown name, a value out of range, an unreadable file."""

    exit_status = 2


class FolderError(InputError):
    """A folder can't be used: another process works on it, it holds something else, or it can't be written to."""


class RunError(PolyfedError):
    """A run that started could not continue."""


class ClientError(RunError):
    """Code that a client runs has failed: a network, a loss, a dataset. The cause is the original error."""


class LostError(RunError):
    """Clients' states were lost with the machine that held them; a checkpoint has earlier ones."""


class BadMessage(PolyfedError):
    """A message has the wrong names, shapes, types or values; a reply that raises this is left out of its round."""


class DivergedError(RunError):
    """A training loss became NaN or infinite."""

    def __init__(self, message: str, client: int | None = None) -> None:
        super().__init__(message)
        self.client = client
        """Whose training it was, as its engine numbers clients."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> InputError:
    """The error for a name that does not exist, with the nearest name that does.

    >>> str(unknown_name("method", "fedprot", ["fedproto", "fedavg"]))
    "unknown method 'fedprot': did you mean 'fedproto'? Known: fedavg, fedproto."
    >>> str(unknown_name("method", "?", ["fedproto", "fedavg"]))
    "unknown method '?'; there are fedavg, fedproto."
    """
    names = sorted(known)
    near = get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    hint = f": did you mean '{near[0]}'? Known:" if near else "; there are"
    return InputError(f"unknown {kind} '{name}'{hint} {', '.join(names)}.")


def counted(number: int, thing: str) -> str:
    """
    >>> counted(1, "sample"), counted(2, "sample"), counted(0, "class")
    ('1 sample', '2 samples', '0 classes')
    """
    return f"{number} {thing}" if number == 1 else f"{number} {thing}{'es' if thing.endswith('s') else 's'}"


def listed(names: Sequence[str]) -> str:
    """
    >>> listed(["amber"]), listed(["amber", "birch"]), listed(["amber", "birch", "cedar"])
    ('amber', 'amber and birch', 'amber, birch and cedar')
    """
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def clients_named(clients: Sequence[int]) -> str:
    """Clients in words; of many only the first.

    >>> clients_named([3]), clients_named([0, 2]), clients_named(range(49))
    ('client 3', 'clients 0 and 2', 'clients 0, 1, 2 and 46 others')
    """
    if len(clients) == 1:
        return f"client {clients[0]}"
    shown = [str(client) for client in (clients if len(clients) <= 4 else clients[:3])]
    last = shown.pop() if len(clients) <= 4 else f"{len(clients) - 3} others"
    return f"clients {listed([*shown, last])}"


def user_place(error: BaseException) -> str:
    """Where in the user's own code an error was raised, to append to a message; empty if it was raised elsewhere."""
    polyfed = str(Path(__file__).parent)
    libraries = (polyfed, sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith(("<", *libraries))]
    if not own:
        return ""
    file = Path(own[-1].filename)
    shown = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    return f" ({shown}, line {own[-1].lineno})"


def first_line(error: BaseException) -> str:
    """An error of another library as part of our sentence."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".: ")
