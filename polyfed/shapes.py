"""The shape of one sample as a network sees it; for token ids with what a network must know about them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class TokenShape(tuple[int, ...]):
    """The shape of a sample of token ids, (length,), with the number of ids and the one that fills short samples.

    It is a tuple, so all that asks for a sample's shape only need not know about tokens.

    >>> shape = TokenShape((20,), vocabulary=100, padding=0)
    >>> shape == (20,), shape.vocabulary, shape.padding
    (True, 100, 0)
    """

    vocabulary: int
    padding: int | None

    def __new__(cls, shape: Iterable[int], vocabulary: int, padding: int | None = None) -> TokenShape:
        made = super().__new__(cls, tuple(shape))
        made.vocabulary, made.padding = vocabulary, padding
        return made

    def __getnewargs__(self) -> tuple[tuple[int, ...], int, int | None]:
        return tuple(self), self.vocabulary, self.padding


def as_shape(sides: Iterable[int]) -> tuple[int, ...]:
    """A shape as a tuple; what it says about token ids stays."""
    return sides if isinstance(sides, TokenShape) else tuple(sides)


def kind_of(shape: tuple[int, ...]) -> torch.dtype:
    """The type of samples that are not pixels."""
    return torch.int64 if isinstance(shape, TokenShape) else torch.float32


def noise(count: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Random samples: any ids of the vocabulary, or normal floats."""
    size = (count, *shape)
    if isinstance(shape, TokenShape):
        return torch.randint(shape.vocabulary, size, generator=generator, device="cpu")
    return torch.randn(size, generator=generator, device="cpu")
