"""polyfed: model-heterogeneous personalised federated learning.

>>> import polyfed
>>> result = polyfed.run("fedproto", data="digits", clients=10, rounds=5)   # doctest: +SKIP
>>> result.rounds["accuracy_mean"]                                          # doctest: +SKIP
"""

from polyfed.api import Result, resume, run
from polyfed.config import Experiment, experiment, read_experiment
from polyfed.data import Dataset, from_arrays, from_torch_dataset, load_dataset
from polyfed.errors import InputError, PolyfedError, RunError
from polyfed.federation import Watcher
from polyfed.methods import METHODS
from polyfed.methods.base import Method, Training
from polyfed.models import SplitNetwork, split_network
from polyfed.records import RunFolder

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "Dataset",
    "Experiment",
    "InputError",
    "Method",
    "PolyfedError",
    "Result",
    "RunError",
    "RunFolder",
    "SplitNetwork",
    "Training",
    "Watcher",
    "experiment",
    "from_arrays",
    "from_torch_dataset",
    "load_dataset",
    "read_experiment",
    "resume",
    "run",
    "split_network",
]
