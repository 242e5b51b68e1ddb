"""Settings for all tests, and for the examples in the package's documentation strings."""

import os
from importlib.util import find_spec

import torch

# Without a GPU, the kernels written for one are interpreted.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Tiny networks gain nothing from several compute threads and lose a lot on a busy machine.
torch.set_num_threads(1)

# Doctests import every module of the package; these can't be imported without a package that not every machine has.
NEEDED = {"polyfed/**/kernels.py": "triton"}
collect_ignore_glob = [modules for modules, package in NEEDED.items() if find_spec(package) is None]
