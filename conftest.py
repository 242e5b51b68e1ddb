"""Settings for all tests, and for the examples in the package's documentation strings."""

import os
import random
from collections.abc import Iterator
from importlib.util import find_spec

import numpy as np
import pytest
import torch

# Without a GPU, the kernels written for one are interpreted.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Tiny networks gain nothing from several compute threads and lose a lot on a busy machine.
torch.set_num_threads(1)

# Doctests import every module of the package; these can't be imported without a package that not every machine has.
NEEDED = {
    "polyfed/**/kernels.py": "triton",
    "polyfed/**/certificates.py": "cryptography",
    "polyfed/flower/*.py": "flwr",
}
collect_ignore_glob = [modules for modules, package in NEEDED.items() if find_spec(package) is None]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What a test draws from global generators follows from a seed that is shown if it fails, and can be given."""
    seed = int(os.environ.get("POLYFED_TEST_SEED") or random.SystemRandom().randrange(2**31))
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    item.add_report_section("call", "seed", f"POLYFED_TEST_SEED={seed} draws the same again")


@pytest.fixture(autouse=True)
def _registries_as_before() -> Iterator[None]:
    """Methods and engines that a test registers are unknown again after it."""
    from polyfed.methods import METHODS  # not before the environment is set
    from polyfed.registry import ENGINES

    before = [(registry, dict(registry._classes)) for registry in (METHODS, ENGINES)]
    yield
    for registry, classes in before:
        registry._classes.clear()
        registry._classes.update(classes)
