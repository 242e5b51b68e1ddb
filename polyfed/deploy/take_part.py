"""A site that takes part: connects, trains when asked, keeps its state and a log of what it sent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from polyfed.deploy.keys import public_line, read_private_key
from polyfed.deploy.member import Member
from polyfed.deploy.outcome import has_model, keep_final
from polyfed.errors import InputError
from polyfed.flower import check_installed
from polyfed.records import disk
from polyfed.records.claim import locked, writable
from polyfed.remote import Packet, Site
from polyfed.remote.checks import readable
from polyfed.remote.transport import Kind

LONGEST_LINE = 2000
Tell = Callable[[str], None]


def take_part(member: Member, tell: Tell) -> None:
    """Stay connected and answer until the run is finished; after a crash, the same again continues."""
    check_installed()
    from polyfed.flower.node import SiteConnection  # only now is it known that Flower is there

    settings = member.settings
    key = read_private_key(member.key)
    if public_line(key) != member.terms.members[member.name]:
        raise InputError(
            f"the key in '{member.key}' is not the one that '{settings.federation}' has for '{member.name}': send the "
            f"coordinator this line, or use the key that belongs to it: {public_line(key)}"
        )
    with writable(settings.folder, "folder in site.yaml"):
        disk.make_folder(settings.folder, private=True)
        log = Log(settings.folder / "site.log", tell)
    with log, locked(settings.folder):
        population = member.population()
        site = member.site(population, keep=partial(keep_final, member, population))
        answering = Answering(site, log.add)
        connection = SiteConnection(settings.server, settings.certificate, key, answering, log.add)
        connection.largest = site.largest_question
        answering.finished = connection.stop
        if has_model(settings.folder):
            log.add(
                f"run {member.terms.name} has ended here, and its model is in '{settings.folder / 'model'}'; "
                "connecting again, in case the server does not know it yet"
            )
        try:
            connection.run()
        finally:
            site.close()


class Answering:
    """A site's answers, each with a line in the log; the last one ends the connection."""

    def __init__(self, site: Site, add: Tell) -> None:
        self._site = site
        self._add = add
        self.finished = threading.Event()

    def __call__(self, kind: Kind, packet: Packet) -> Packet:
        begin = time.monotonic()
        answer = self._site.answer(kind, packet)
        self._add(_line(kind, packet, answer, time.monotonic() - begin))
        for note in self._site.notes:
            self._add(f"note: {note}")
        self._site.notes.clear()
        if kind == "finish" and not answer.failed:
            self.finished.set()
        return answer


class Log:
    """Lines with their time in a file, and on the screen."""

    def __init__(self, path: Path, tell: Tell) -> None:
        self._tell = tell
        path.touch(0o600)
        path.chmod(0o600)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):
            self._file.close()

    def add(self, line: str) -> None:
        """Add a line; a server's words in it can neither begin another one nor steer a terminal.

        A full disk must not end the site.
        """
        line = readable(line, LONGEST_LINE)
        with suppress(OSError):
            self._file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {line}\n")
        with suppress(OSError):
            self._tell(line)


def _line(kind: Kind, packet: Packet, answer: Packet, seconds: float) -> str:
    """What was asked and what was answered, for the log: everything that left is named."""
    asked = {"join": "asked to join", "evaluate": "asked for its scores", "finish": "told that the run is finished"}
    words = asked.get(kind, f"asked to train round {packet.facts.get('round')}")
    if answer.failed:
        return f"{words}; refused: {answer.facts['failure']}"
    facts = ", ".join(sorted(answer.facts)) or "nothing"
    floats = 0 if answer.message is None else answer.message.floats
    sent = f"sent {facts}" + (f" and {floats} floats" if floats else "")
    return f"{words}; {sent} after {seconds:.1f} s"
