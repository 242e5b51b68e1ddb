"""polyfed: model-heterogeneous personalised federated learning.

>>> import polyfed
>>> result = polyfed.run("fedproto", data="digits", clients=10, rounds=5)   # doctest: +SKIP
>>> result.rounds["accuracy_mean"]                                          # doctest: +SKIP
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyfed.api import Result, resume, run
    from polyfed.comparison.compare import Comparison, compare
    from polyfed.config import Experiment, experiment, read_experiment
    from polyfed.data import Dataset, from_arrays, from_torch_dataset, load_dataset
    from polyfed.engines.base import Engine
    from polyfed.errors import InputError, PolyfedError, RunError
    from polyfed.export.load import ClientModel, load_client
    from polyfed.export.write import export_client
    from polyfed.methods import METHODS
    from polyfed.methods.base import Method, Training
    from polyfed.models import SplitNetwork, split_network
    from polyfed.predictions import Prediction
    from polyfed.records import RunFolder
    from polyfed.server.federation import Watcher
    from polyfed.tuning import tune

__version__ = "0.2.0.dev0"

__all__ = [
    "METHODS",
    "ClientModel",
    "Comparison",
    "Dataset",
    "Engine",
    "Experiment",
    "InputError",
    "Method",
    "PolyfedError",
    "Prediction",
    "Result",
    "RunError",
    "RunFolder",
    "SplitNetwork",
    "Training",
    "Watcher",
    "compare",
    "experiment",
    "export_client",
    "from_arrays",
    "from_torch_dataset",
    "load_client",
    "load_dataset",
    "read_experiment",
    "resume",
    "run",
    "split_network",
    "tune",
]

_HOMES = {
    "api": ("Result", "resume", "run"),
    "comparison.compare": ("Comparison", "compare"),
    "config": ("Experiment", "experiment", "read_experiment"),
    "data": ("Dataset", "from_arrays", "from_torch_dataset", "load_dataset"),
    "engines.base": ("Engine",),
    "errors": ("InputError", "PolyfedError", "RunError"),
    "export.load": ("ClientModel", "load_client"),
    "export.write": ("export_client",),
    "methods": ("METHODS",),
    "methods.base": ("Method", "Training"),
    "models": ("SplitNetwork", "split_network"),
    "predictions": ("Prediction",),
    "records": ("RunFolder",),
    "server.federation": ("Watcher",),
    "tuning": ("tune",),
}
"""Where each name lives; it is imported when first asked for, so that the command line can answer Ctrl-C meanwhile."""


def _find(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"polyfed.{home}"), name)
    try:
        return import_module(f"polyfed.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"polyfed.{name}":
            raise
        raise AttributeError(f"module 'polyfed' has no attribute '{name}'") from None


if not TYPE_CHECKING:  # type checkers know the names above and should miss any other
    __getattr__ = _find


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
