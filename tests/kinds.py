"""Small datasets of each kind of sample, with networks for them."""

from __future__ import annotations

import torch

from polyfed.data import Dataset, from_arrays

CLASSES, PER_CLASS = 4, 30


def _labels() -> torch.Tensor:
    return torch.arange(CLASSES).repeat_interleave(PER_CLASS)


def signals(channels: int = 2, length: int = 24) -> Dataset:
    """Waves whose frequency tells the class, with noise."""
    labels, generator = _labels(), torch.Generator().manual_seed(3)
    times = torch.arange(length) / length
    waves = torch.sin(2 * torch.pi * (labels + 1)[:, None, None] * times) * torch.ones(channels, 1)
    return from_arrays(waves + 0.2 * torch.randn(waves.shape, generator=generator), labels, name="waves")


def texts(length: int = 9, vocabulary: int = 20, padding: int | None = 0) -> Dataset:
    """Token ids, of which two of one class's own tell the class; padding at the end, of different lengths."""
    labels, generator = _labels(), torch.Generator().manual_seed(4)
    ids = torch.randint(10, vocabulary, (len(labels), length), generator=generator)
    ids[:, 0] = ids[:, 2] = labels + 1
    lengths = torch.randint(4, length + 1, (len(labels), 1), generator=generator)
    if padding is not None:
        ids = torch.where(torch.arange(length) < lengths, ids, padding)
    return from_arrays(ids, labels, name="words", vocabulary=vocabulary, padding=padding)


def tables(columns: int = 5) -> Dataset:
    """Points around one centre per class."""
    labels, generator = _labels(), torch.Generator().manual_seed(5)
    centres = 2 * torch.randn(CLASSES, columns, generator=generator)
    return from_arrays(centres[labels] + torch.randn(len(labels), columns, generator=generator), labels, name="points")


KINDS = {"signal4": signals, "text4": texts, "tabular4": tables}
"""By group of networks, data for it."""
