"""Every test has its own sites' modules; some have a server's keys."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from polyfed.deploy import keys
from tests.deploy.files import HOSTS


@pytest.fixture(autouse=True)
def own_modules(tmp_path: Path) -> Iterator[None]:
    """Forget modules that a test wrote into its folder: in another test, others have the same names."""
    before = list(sys.path)
    yield
    sys.path[:] = before
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A folder with an authority, and a server's key and certificate."""
    keys.make_server_keys(tmp_path / "keys", HOSTS)
    return tmp_path / "keys"
