"""The images of all clients' batches, looked up, normalised and augmented; on a GPU by a kernel of our own."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from polyfed.data import Dataset
from polyfed.engines.client.batches import IMAGE, VIEWS, augmented
from polyfed.engines.stacked import layers
from polyfed.message import State


def images(dataset: Dataset, rows: Tensor, draws: Mapping[str, State]) -> tuple[Tensor, Tensor | None]:
    """The samples with these numbers, and two views of each, [samples, 2, …], where there are draws for them.

    `draws`: by purpose and name, one for each sample; flags may be whole numbers.
    """
    kernels = _kernels(dataset)
    if kernels is None:
        flags = {
            purpose: {name: tensor.bool() if name == "flip" else tensor for name, tensor in own.items()}
            for purpose, own in draws.items()
        }
        return augmented(dataset.normalise(dataset.images.index_select(0, rows)), flags)
    looked_up = {
        purpose: kernels.look_up(dataset.images, rows, *dataset.scaling(rows.device), draws.get(purpose, {}))
        for purpose in (IMAGE, *(view for view in VIEWS if view in draws))
    }
    return looked_up.pop(IMAGE), torch.stack(list(looked_up.values()), 1) if looked_up else None


def _kernels(dataset: Dataset) -> Any:
    """The module with the kernel, or None where it can't be used."""
    pictures = dataset.images
    usable = pictures.dim() == 4 and pictures.dtype == torch.uint8 and pictures.is_contiguous()
    if not usable or not layers.on_gpu(pictures) or layers.kernels() is None:
        return None
    return import_module("polyfed.engines.stacked.image_kernels")
