"""Datasets from numpy arrays and torch tensors, checked so that nothing is misread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.data.dataset import Dataset
from polyfed.data.labels import check_complete, count_classes, no_regression, numbered
from polyfed.data.mapped import ROWS, in_pieces, mapped_tensor
from polyfed.data.natural import with_clients
from polyfed.errors import InputError, unknown_name

Array = NDArray[Any] | Tensor
"""A numpy array or a torch tensor."""

Layout: TypeAlias = Literal["auto", "channels-first", "channels-last", "grey"]
"""Where images have their channels; auto: pixels are recognised, floats are used as they are."""

PIXELS_FROM = 20.0
"""Float images with a value above it (and none below 0) are not normalised: they are pixels of 0 to 255."""


def from_arrays(
    x: Array,
    y: Array,
    x_test: Array | None = None,
    y_test: Array | None = None,
    name: str = "arrays",
    *,
    classes: int | None = None,
    class_names: Sequence[str] | None = None,
    vocabulary: int | None = None,
    padding: int | None = None,
    client: Array | Sequence[Any] | None = None,
    client_test: Array | Sequence[Any] | None = None,
    layout: Layout | str = "auto",
) -> Dataset:
    """A dataset from numpy arrays or torch tensors.

    `uint8` images may be N,H,W or N,H,W,C or N,C,H,W; they are normalised with the mean and standard deviation per
    channel of `x`. Float arrays of any shape are used as they are, because they may be signals or rows of a table; for
    float images in another layout than N,C,H,W say so (`layout="channels-last"`, or `"grey"` for N,H,W).

    Labels are whole numbers 0 … C − 1, each of which occurs; give `classes` or `class_names` if some do not occur in
    these samples. Words and one-hot rows are accepted too. Samples of `x_test` are kept for testing, unless the
    experiment's `test_set` says otherwise. `client` and `client_test` say whose each sample is, by numbers or names,
    for the partition `natural`.

    Integers are token ids if `vocabulary` says how many different ones there are; `padding` is the id that fills short
    samples, if there is one, and then lists of different lengths are accepted too.

    >>> dataset = from_arrays(np.zeros((4, 28, 28), np.uint8), np.array([0, 1, 2, 0]))
    >>> dataset.input_shape, dataset.classes
    ((1, 28, 28), 3)
    """
    if isinstance(class_names, str):
        raise InputError(f"class_names is the text '{class_names}': give a list with a name for each class.")
    class_names = None if class_names is None else tuple(str(each) for each in class_names)
    y, y_test, class_names = numbered(y, y_test, name, class_names)
    tokens = vocabulary is not None
    if tokens and padding is not None:
        x, x_test = _filled(x, x_test, padding)
    x, x_test = laid_out(x, layout, name), None if x_test is None else laid_out(x_test, layout, name)
    images, labels, official_test = join_arrays(x, y, x_test, y_test, name, tokens=tokens)
    dataset = measured_dataset(images, labels, official_test, name, classes, class_names, vocabulary, padding)
    return with_clients(dataset, client, client_test)


def join_arrays(
    x: Array, y: Array, x_test: Array | None, y_test: Array | None, name: str, *, tokens: bool = False
) -> tuple[Tensor, Tensor, int]:
    """Samples and labels in the form that a `Dataset` needs, test samples last, and the number of test samples."""
    if (x_test is None) != (y_test is None):
        raise InputError(f"dataset '{name}' has only one of x_test and y_test: give both or neither.")
    images, labels = _images(x, name, tokens=tokens), _labels(y, name)
    _check_pairs(images, labels, name)
    if x_test is None or y_test is None:
        return images, labels, 0
    if len(x_test) == 0 and len(y_test) == 0:
        raise InputError(f"dataset '{name}' has an empty test set: leave x_test and y_test out, or fill them.")
    if isinstance(x, np.memmap):
        raise InputError(
            f"dataset '{name}' stays on disk, so x_test can't be joined with it: leave x_test and y_test out, and the "
            f"split reserves test samples in each client."
        )
    test_images, test_labels = _images(x_test, name, tokens=tokens), _labels(y_test, name)
    _check_pairs(test_images, test_labels, name)
    if test_images.dtype != images.dtype or test_images.shape[1:] != images.shape[1:]:
        raise InputError(
            f"dataset '{name}' has {images.dtype} training samples of shape {tuple(images.shape[1:])} but "
            f"{test_images.dtype} test samples of shape {tuple(test_images.shape[1:])}: make them the same."
        )
    return torch.cat([images, test_images]), torch.cat([labels, test_labels]), len(test_labels)


def measured_dataset(
    images: Tensor,
    labels: Tensor,
    official_test: int,
    name: str,
    classes: int | None = None,
    class_names: Sequence[str] | None = None,
    vocabulary: int | None = None,
    padding: int | None = None,
) -> Dataset:
    """A dataset that is normalised with the statistics of its own training images."""
    training = images[: len(images) - official_test]
    mean, std = channel_statistics(training) if images.dtype == torch.uint8 else ((), ())
    names = () if class_names is None else tuple(str(each) for each in class_names)
    if classes is None:
        classes = len(names) or count_classes(labels, name)
        if names and int(labels.max()) >= classes:
            raise InputError(
                f"dataset '{name}' has labels up to {int(labels.max())}, but {classes} class_names: give a name for "
                f"each class, so {int(labels.max()) + 1} of them, or more."
            )
    return Dataset(
        name,
        images,
        labels,
        classes,
        mean,
        std,
        official_test,
        class_names=names,
        vocabulary=vocabulary,
        padding=padding,
    )


def channel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel of `uint8` images [n, channels, height, width], scaled to [0, 1].

    Counts how often each of the 256 values occurs, so no float copy of the images is made. A channel with a
    single value gets the standard deviation 1, so that results stay finite.
    """
    pixels, values = images.numpy(), np.arange(256) / 255
    counts = np.zeros((pixels.shape[1], 256), dtype=np.int64)
    for start in range(0, len(pixels), 1000):  # in steps, because bincount widens what it counts to int64
        for channel in range(pixels.shape[1]):
            counts[channel] += np.bincount(pixels[start : start + 1000, channel].reshape(-1), minlength=256)
    frequencies = counts / counts.sum(axis=1, keepdims=True)
    means = frequencies @ values
    deviations = np.sqrt((frequencies * (values - means[:, None]) ** 2).sum(axis=1))
    deviations[deviations < 1e-6] = 1.0
    return tuple(means.tolist()), tuple(deviations.tolist())


def channels_first(images: Tensor) -> Tensor:
    """`uint8` images as [n, channels, height, width], whichever of the usual layouts they have.

    A last axis of 1 or 3 holds the channels; otherwise a second axis of 1 or 3; otherwise the shorter of the two.
    """
    if images.ndim == 3:
        return images.unsqueeze(1)
    second, last = images.shape[1], images.shape[3]
    channels_last = last in (1, 3) or (second not in (1, 3) and last < second)
    return images.permute(0, 3, 1, 2) if channels_last else images


@contextmanager
def layout_hint(dataset: Dataset) -> Iterator[None]:
    """If a network refuses samples inside, and these are float images in another layout, say that.

    Float data are used as they are, because a user's own network may expect that.
    """
    try:
        yield
    except InputError as error:
        shape = dataset.input_shape
        if dataset.images.dtype == torch.uint8:
            raise
        if len(shape) == 3 and shape[2] in (1, 3, 4) and min(shape[:2]) > shape[2]:
            remedy = "look like images with their channels last: say so (layout=channels-last)"
        elif len(shape) == 2 and min(shape) >= 8 and "signal" not in str(error).partition(" needs ")[0]:
            remedy = "look like images without a channel: say so (layout=grey)"
        else:
            raise
        reason = str(error).removesuffix(".").removesuffix(": enlarge them")
        raise InputError(f"{reason}; float samples of '{dataset.name}' {remedy}.") from error


def laid_out(x: Any, layout: str, name: str) -> Any:
    """Images with their channels first, from the layout that the user names."""
    if layout == "auto":
        return x
    dimensions = {"channels-first": 4, "channels-last": 4, "grey": 3}
    if layout not in dimensions:
        raise unknown_name("layout", str(layout), ["auto", *dimensions])
    images = _tensor(x, "images", name)
    if images.ndim != dimensions[layout]:
        raise InputError(
            f"layout is '{layout}', but the samples of '{name}' have {images.ndim - 1} dimensions instead of "
            f"{dimensions[layout] - 1}: leave it out, or give images."
        )
    if layout == "channels-first":
        return images
    return images.unsqueeze(1) if layout == "grey" else images.movedim(-1, 1)


def _filled(x: Any, x_test: Any, padding: int) -> tuple[Any, Any]:
    """Lists of token ids of different lengths as arrays of one length, filled up with the padding."""
    if not isinstance(x, list | tuple):
        return x, x_test
    longest = max((len(ids) for part in (x, x_test) if part is not None for ids in part), default=0)
    filled = [
        None if part is None else np.array([[*ids, *[padding] * (longest - len(ids))] for ids in part])
        for part in (x, x_test)
    ]
    return filled[0], filled[1]


def _images(x: Array, name: str, *, tokens: bool = False) -> Tensor:
    """Samples as a contiguous tensor: `uint8` [n, channels, height, width], `float32` [n, …] or `int64` token ids."""
    tensor = _tensor(x, "images", name)
    if tensor.ndim == 0 or len(tensor) == 0:
        raise InputError(f"dataset '{name}' has no samples: give at least one.")
    if tokens and not tensor.is_floating_point():
        return tensor.to(torch.int64).contiguous()
    if tensor.is_floating_point() and not tokens:
        tensor = tensor.to(torch.float32).contiguous()
        _check_floats(tensor, name)
        return tensor
    if tokens:
        raise InputError(f"dataset '{name}' has a vocabulary, but {tensor.dtype} samples: token ids must be integers.")
    if tensor.dtype != torch.uint8 or tensor.ndim not in (3, 4):
        raise InputError(
            f"dataset '{name}' has {tensor.dtype} data of shape {tuple(tensor.shape)}: give uint8 images "
            f"(N,H,W or N,H,W,C or N,C,H,W), float arrays, or token ids with vocabulary=… (how many there are)."
        )
    arranged = channels_first(tensor)
    return arranged if isinstance(x, np.memmap) else arranged.contiguous()


def _check_floats(tensor: Tensor, name: str) -> None:
    """Check that float data are finite, and are not raw pixels, which would be used without normalisation."""
    if tensor.ndim < 2:
        raise InputError(f"dataset '{name}' has float data of shape {tuple(tensor.shape)}: give [samples, …].")
    wrong = [row for piece in in_pieces(tensor) for row in _not_finite(piece)]
    if wrong:
        start = next(n for n, piece in enumerate(in_pieces(tensor)) if _not_finite(piece)) * ROWS
        first = [start + wrong[0][0], *wrong[0][1:]]
        what = "NaN" if bool(torch.isnan(tensor[tuple(first)])) else "infinite"
        raise InputError(
            f"dataset '{name}' has values that are not finite numbers, {len(wrong)} in all, the first (a value that "
            f"is {what}) at index {first}: replace such values, or leave these samples out."
        )
    low, high = float(tensor.min()), float(tensor.max())
    images = tensor.ndim == 4 and bool({1, 3, 4} & {tensor.shape[1], tensor.shape[3]})
    # Without an axis for channels it may be any table; whole numbers up to 255 mean a grey image.
    grey = (
        tensor.ndim == 3
        and min(tensor.shape[1:]) >= 8
        and all(bool((piece == piece.round()).all()) for piece in in_pieces(tensor))
    )
    if low >= 0 and PIXELS_FROM < high <= 255 and (images or grey):
        raise InputError(
            f"dataset '{name}' has float images with values from {low:g} to {high:g}, which look like pixels of 0 to "
            f"255: give them as uint8 (x.astype('uint8')) to have them normalised, or normalise them yourself."
        )


def _not_finite(piece: Tensor) -> list[list[int]]:
    """The indices of values that are no finite numbers."""
    found: list[list[int]] = torch.nonzero(~torch.isfinite(piece)).tolist()
    return found


def _labels(y: Array, name: str) -> Tensor:
    """Labels as `int64` [n]; a column [n, 1] and floats that are whole numbers are accepted too."""
    check_complete(y, name)
    tensor = _tensor(y, "labels", name)
    if tensor.ndim == 2 and tensor.shape[1] == 1:
        tensor = tensor.squeeze(1)
    if tensor.ndim == 2:
        raise InputError(
            f"dataset '{name}' has labels of shape {tuple(tensor.shape)}: give one whole number or word per sample, or "
            f"one-hot rows with a single 1 each."
        )
    if tensor.ndim != 1 or tensor.is_complex():
        raise InputError(
            f"dataset '{name}' has {tensor.dtype} labels of shape {tuple(tensor.shape)}: give one whole number per "
            f"sample."
        )
    if tensor.is_floating_point():
        wrong = torch.nonzero((tensor != tensor.round()) | ~torch.isfinite(tensor)).flatten()
        if len(wrong):
            first = int(wrong[0])
            raise no_regression(name, f"the value {float(tensor[first]):g} at index {first}")
    return tensor.to(torch.int64).contiguous()


def _tensor(values: Array, what: str, name: str) -> Tensor:
    """A separate tensor on the CPU: the caller may change its array later, and the dataset must not change with it.

    Only an array on disk stays where it is.
    """
    if isinstance(values, np.memmap) and what == "images":
        return mapped_tensor(values, name)
    if isinstance(values, Tensor):
        return values.detach().to("cpu", copy=True)
    try:
        array = np.asarray(values)
    except ValueError:  # a list of arrays of different shapes
        raise InputError(
            f"dataset '{name}' has {what} of different shapes: resize the samples first, and give one array."
        ) from None
    try:
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))
    except TypeError:
        raise InputError(
            f"dataset '{name}' has {what} of type {array.dtype}: give an array of uint8, integers or floats."
        ) from None


def _check_pairs(images: Tensor, labels: Tensor, name: str) -> None:
    if len(images) != len(labels):
        raise InputError(
            f"dataset '{name}' has {len(images)} samples but {len(labels)} labels: give one label per sample."
        )
