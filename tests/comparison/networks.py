"""Networks that give trouble: one ends its process once, one loses the GPU once, one can't be stacked."""

import os
import signal
from pathlib import Path

import torch
from torch import Tensor

from tests.support import Narrow


class Deadly(Narrow):
    """Kills the first process that uses it; the file that $POLYFED_TEST_DIES names remembers that."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            os.close(os.open(os.environ["POLYFED_TEST_DIES"], os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return super().forward(x)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


class Faulty(Narrow):
    """Pretends that the first process that uses it has lost its GPU, as `Deadly` remembers it."""

    lost = False

    def forward(self, x: Tensor) -> Tensor:
        try:
            os.close(os.open(os.environ["POLYFED_TEST_DIES"], os.O_CREAT | os.O_EXCL))
            Faulty.lost = True
            torch.cuda.is_initialized = lambda: True
            torch.cuda.synchronize = _lost
        except FileExistsError:
            pass
        return _lost() if self.lost else super().forward(x)


def _lost(device: object = None) -> Tensor:
    raise RuntimeError("an illegal memory access was encountered")


class Talkative(Narrow):
    """Adds the number of its process to the file that $POLYFED_TEST_SAYS names, and fails."""

    def forward(self, x: Tensor) -> Tensor:
        with Path(os.environ["POLYFED_TEST_SAYS"]).open("a") as file:
            file.write(f"{os.getpid()}\n")
        raise ValueError("nothing works here")


class Branching(Narrow):
    """Its forward decides on the data, so its clients train one after another."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if bool(x.sum() > -1e9) else super().forward(-x)
