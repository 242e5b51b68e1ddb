"""Ways to convolve stacked images, each client's with its own weights: what is computed, without gradients' rules.

Images are [clients, samples, channels, H, W], weights [clients, out, in, …], biases [clients, out].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

MOST_CHANNELS = (32, 64)
"""In and out, of a convolution for which our kernels are faster than cuDNN's."""
MOST_VALUES = 2**31
"""The most values in one client's images or patches, which the kernels index with 32 bits."""


Pair = tuple[int, int]
"""One of heights and one of widths."""


class Windows(NamedTuple):
    """The windows of a max-pooling."""

    size: Pair
    stride: Pair
    padding: Pair
    dilation: Pair

    def grid(self, height: int, width: int) -> Pair:
        """How many windows there are."""
        sides = zip((height, width), *self, strict=True)
        down, across = ((side + 2 * p - d * (size - 1) - 1) // step + 1 for side, size, step, p, d in sides)
        return down, across

    def numbers(self) -> tuple[int, ...]:
        return (*self.size, *self.stride, *self.padding, *self.dilation)


class Way(Protocol):
    """One way to convolve, with its shapes of filters, strides and padding."""

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...

    def image_gradient(self, gradient: Tensor, weight: Tensor, shape: tuple[int, ...]) -> Tensor:
        """From that of the result; `shape` is that of one client's images."""

    def weight_gradient(self, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Of weights and biases."""


def way(x: Tensor, weight: Tensor, windows: Windows, groups: int, biased: bool) -> Way | None:
    """How these images of one client (and those of all others) are convolved; None: as PyTorch and `vmap` do it.

    That is one convolution with a group of channels per client, for which cuDNN has slow kernels. Few channels go to
    our own kernels. With more, or a stride, patches are written to memory for a product of matrices.
    """
    simple = windows.stride == windows.dilation == (1, 1) and all(
        p < k for p, k in zip(windows.padding, windows.size, strict=True)
    )
    if groups != 1:
        return None
    if simple and few_channels(weight):
        return Direct(windows)
    down, across = windows.grid(x.shape[2], x.shape[3])
    if len(x) * down * across * weight[0].numel() < MOST_VALUES:
        return Products(windows, biased)
    return None


def few_channels(weight: Tensor) -> bool:
    """Whether one client's convolution has so few channels that our own kernels are faster."""
    return weight.shape[1] <= MOST_CHANNELS[0] and weight.shape[0] <= MOST_CHANNELS[1]


@dataclass(frozen=True)
class Direct:
    """By kernels that read the patches from the images; only with a stride of 1."""

    windows: Windows

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y: Tensor = _kernels("kernels").convolve(x, weight, bias, self.windows.padding)
        return y

    def image_gradient(self, gradient: Tensor, weight: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The filters turned around."""
        around = tuple(k - 1 - p for k, p in zip(self.windows.size, self.windows.padding, strict=True))
        of_x: Tensor = _kernels("kernels").convolve(gradient, weight, None, around, turned=True)
        return of_x

    def weight_gradient(self, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        of_weight, of_bias = _kernels("kernels").weight_gradient(x, gradient, self.windows.size, self.windows.padding)
        return of_weight, of_bias


@dataclass(frozen=True)
class Products:
    """By products of matrices, the weights times patches; a single client's by PyTorch.

    Results lie in memory as [clients, channels, samples, H, W]: so they come out of the product, and so a filter of one
    pixel needs no patches.
    """

    windows: Windows
    biased: bool

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if len(x) == 1:
            return torch.conv2d(x[0], weight[0], None if bias is None else bias[0], *self._options())[None]
        y = torch.bmm(weight.flatten(2), self._patches(x))
        if bias is not None:
            y += bias[..., None]
        return _images(y, x.shape[1], *self.windows.grid(x.shape[3], x.shape[4]))

    def image_gradient(self, gradient: Tensor, weight: Tensor, shape: tuple[int, ...]) -> Tensor:
        if len(gradient) == 1:
            return self._alone(gradient, gradient.new_empty(1).expand(shape), weight, (True, False, False))[0][None]
        patches = torch.bmm(weight.flatten(2).mT, _matrix(gradient))
        if self._plain():
            return _images(patches, shape[0], *shape[2:])
        images: Tensor = _kernels("patch_kernels").fold(patches, self.windows, shape)
        return images

    def weight_gradient(self, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        of_bias = gradient.sum((1, 3, 4)) if self.biased else gradient.new_empty(gradient.shape[::2][:2])
        if len(x) == 1:
            weight = x.new_empty(1).expand(1, gradient.shape[2], x.shape[2], *self.windows.size)
            return self._alone(gradient, x[0], weight, (False, True, False))[1][None], of_bias
        product = torch.bmm(_matrix(gradient), self._patches(x).mT)
        return product.view(*product.shape[:2], -1, *self.windows.size), of_bias

    def _patches(self, x: Tensor) -> Tensor:
        """[clients, channels × filter, samples × pixels]"""
        columns: Tensor = _matrix(x) if self._plain() else _kernels("patch_kernels").unfold(x, self.windows)
        return columns

    def _plain(self) -> bool:
        return self.windows[:3] == ((1, 1), (1, 1), (0, 0))

    def _options(self) -> tuple[Any, ...]:
        return self.windows.stride, self.windows.padding, self.windows.dilation

    def _alone(self, gradient: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, ...]) -> tuple[Tensor, ...]:
        backward: Callable[..., tuple[Tensor, ...]] = torch.ops.aten.convolution_backward
        return backward(gradient[0], x, weight[0], None, *self._options(), False, (0, 0), 1, wanted)


def _kernels(name: str) -> Any:
    """A module that can be imported only where Triton is."""
    return import_module(f"polyfed.engines.stacked.{name}")


def _matrix(x: Tensor) -> Tensor:
    """Images as [clients, channels, samples × pixels]."""
    return x.transpose(1, 2).flatten(2)


def _images(matrix: Tensor, *shape: int) -> Tensor:
    """The opposite; `shape` is that of samples, H and W."""
    return matrix.view(*matrix.shape[:2], *shape).transpose(1, 2)
