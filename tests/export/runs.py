"""Small finished runs whose models leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import polyfed
from polyfed.data import Dataset
from tests import support

NAMES = ("ant", "bee", "cat", "dog")


def pictures() -> Dataset:
    """Images that are large enough for the papers' CNNs, with named classes."""
    tiny = support.tiny_dataset(per_class=12, side=16)
    return Dataset("pets", tiny.images, tiny.labels, 4, tiny.mean, tiny.std, class_names=NAMES)


def finished(path: Path, method: Any, models: Any = "cnn5", data: Any = None, **settings: Any) -> Any:
    """The result of a run of two clients."""
    chosen: dict[str, Any] = {"clients": 2, "rounds": 2, "engine": "sequential", "device": "cpu", "lr": 0.1, **settings}
    return polyfed.run(
        method, data=pictures() if data is None else data, models=models, out=path, progress=False, **chosen
    )


def some(shape: tuple[int, ...] = (5, 1, 16, 16)) -> torch.Tensor:
    """Raw images that nobody trained on."""
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
