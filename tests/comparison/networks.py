"""A network that ends its process once, as a machine short of memory does."""

import os
import signal

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
