"""What a client predicts for images: classes, their names, and how probable each class is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyfed.data import Dataset, as_sample
from polyfed.errors import InputError


@dataclass(frozen=True, eq=False)
class Prediction:
    """One row per image, by the method's own rule of prediction."""

    classes: Tensor
    """`int64` [images]: the most probable class of each."""
    names: list[str]
    """The same by name; a class without a name is called by its number."""
    probabilities: Tensor
    """`float32` [images, classes]: the softmax of the rule's scores; 0 for a class that the rule does not know."""

    def __len__(self) -> int:
        return len(self.classes)

    def __repr__(self) -> str:
        shown = [
            f"{name} ({100 * float(row.max()):.0f} %)"
            for name, row in zip(self.names[:5], self.probabilities, strict=False)
        ]
        return f"Prediction({', '.join(shown)}{', …' if len(self) > 5 else ''})"


def prediction(scores: Tensor, dataset: Dataset) -> Prediction:
    """Classes, names and probabilities from scores [images, classes]; −inf marks an unknown class."""
    return named(scores.argmax(1), scores.softmax(1), dataset)


def named(classes: Tensor, probabilities: Tensor, dataset: Dataset) -> Prediction:
    """A prediction with the names of its classes."""
    names = [dataset.class_names[label] if dataset.class_names else str(label) for label in classes.tolist()]
    return Prediction(classes, names, probabilities)


def as_input(x: Any, dataset: Dataset) -> Tensor:
    """Images as a network sees them: one or many, raw (`uint8`, pictures) or floats as the dataset's batches are."""
    return dataset.normalise(as_batch(x, dataset))


def as_batch(x: Any, dataset: Dataset) -> Tensor:
    """The same before normalisation: `uint8` images [images, channels, height, width], or a batch of floats.

    Rows of a table, as a frame with its columns, become the floats that they would have been in training.
    """
    if dataset.table is not None:
        samples: Tensor = dataset.table.constants.samples_of(x, "the frame")
        return samples
    tensor = _tensor(x)
    shape = dataset.input_shape
    if dataset.vocabulary is not None:
        return _token_ids(tensor, shape, dataset.vocabulary)
    if tensor.dtype == torch.uint8 and dataset.images.dtype != torch.uint8:
        raise InputError(
            f"the run trained on float data ('{dataset.name}'), which is used as it is: give floats that were "
            f"prepared in the same way, not uint8."
        )
    if tensor.dtype == torch.uint8:
        return _arranged(tensor, shape)
    if not tensor.is_floating_point():
        raise InputError(f"images of type {tensor.dtype} can't be predicted: give uint8 pixels or floats.")
    tensor = tensor.to(torch.float32)
    batch = tensor[None] if tuple(tensor.shape) == shape else tensor
    if tuple(batch.shape[1:]) != shape:
        raise _wrong_shape(tensor, shape)
    if dataset.images.dtype == torch.uint8 and len(batch):
        _check_normalised(batch, dataset)
    return batch


def _token_ids(tensor: Tensor, shape: tuple[int, ...], vocabulary: int) -> Tensor:
    """One sample of token ids or many, as a batch."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise InputError(f"samples of type {tensor.dtype} can't be predicted: the run trained on token ids.")
    batch = (tensor[None] if tuple(tensor.shape) == shape else tensor).to(torch.int64)
    if tuple(batch.shape[1:]) != shape:
        raise _wrong_shape(tensor, shape)
    if len(batch) and not (int(batch.min()) >= 0 and int(batch.max()) < vocabulary):
        raise InputError(
            f"token ids from {int(batch.min())} to {int(batch.max())} can't be predicted: the run's vocabulary has the "
            f"ids 0 to {vocabulary - 1}."
        )
    return batch


def _tensor(x: Any) -> Tensor:
    if isinstance(x, list | tuple) and len(x):
        samples = [as_sample(each) for each in x]
        if len({sample.shape for sample in samples}) > 1:
            raise InputError("images of different shapes can't be predicted together: resize them first.")
        return torch.stack(samples)
    try:
        return as_sample(x).detach().cpu()
    except TypeError:
        raise InputError(
            f"a value of type {type(x).__name__} can't be predicted: give images as an array, a tensor or pictures."
        ) from None


def _arranged(pixels: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`uint8` images as [images, channels, height, width], from any of the usual layouts, one image or many."""
    channels, height, width = shape
    last, grey = (height, width, channels), (height, width)
    given = tuple(pixels.shape)
    if given in (shape, last) or (channels == 1 and given == grey):
        pixels, given = pixels[None], (1, *given)
    if given[1:] == shape:
        return pixels
    if given[1:] == last:
        return pixels.permute(0, 3, 1, 2)
    if channels == 1 and given[1:] == grey:
        return pixels[:, None]
    raise _wrong_shape(pixels, shape)


def _check_normalised(batch: Tensor, dataset: Dataset) -> None:
    """Check that floats for a network trained on pixels lie in the range of normalised pixels."""
    low = min(-mean / std for mean, std in zip(dataset.mean, dataset.std, strict=True))
    high = max((1 - mean) / std for mean, std in zip(dataset.mean, dataset.std, strict=True))
    least, most = float(batch.min()), float(batch.max())
    if not (low - 1e-3 <= least and most <= high + 1e-3):
        raise InputError(
            f"float images must be normalised like '{dataset.name}', from {low:.4g} to {high:.4g}, but these are "
            f"from {least:.4g} to {most:.4g}: give raw pixels as uint8, or normalise pixels of 0 to 255 as "
            f"(pixel / 255 − mean) / std with mean {_shown(dataset.mean)} and std {_shown(dataset.std)}."
        )


def _shown(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)


def _wrong_shape(tensor: Tensor, shape: tuple[int, ...]) -> InputError:
    return InputError(
        f"images of shape {tuple(tensor.shape)} can't be predicted: the run's have the shape {shape}, so give one such "
        f"image, or many as (images, {', '.join(map(str, shape))})."
    )
