"""What a method keeps in attributes of its own, where no checkpoint finds it.

All state of a run is named tensors. A method that changes an attribute instead has another value in it when the run is
resumed, and may give other numbers from there on.
"""

from __future__ import annotations

from polyfed.methods.base import Method, Server
from polyfed.sameness import differs_in
from polyfed.seeds import watched

_REMEDY = "keep it as a tensor in server.state"


def unsaved(method: Method, server: Server) -> str | None:
    """The first attribute of a method that a resumed run would not have as it is now, or None."""
    with watched():  # what a constructor draws without a seed is not missing elsewhere
        try:
            anew = type(method)(method.config, method.task, method.training)
            if differs_in(method, anew) is None:
                return None
            anew.start(Server(server.seed, server.device))  # it may take long, but whoever resumes calls it too
            return differs_in(method, anew)
        except Exception:  # what can't be made a second time can't be resumed either, and says so then
            return None


def is_unsaved(name: str) -> str:
    """What a run says that has found such an attribute."""
    return (
        f"the method's attribute '{name}' has changed, and no checkpoint holds it: if losses or messages depend on it, "
        f"a resumed run may give other numbers; {_REMEDY}"
    )


def was_unsaved(name: str, round: int) -> str:
    """What a run says that is resumed after that round without it."""
    return (
        f"the method's attribute '{name}' had changed by round {round} and starts anew, because no checkpoint holds "
        f"it: if losses or messages depend on it, numbers from round {round + 1} on may not be what they would have "
        f"been; {_REMEDY}"
    )
