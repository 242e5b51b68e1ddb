"""Small networks to split, for tests."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from polyfed.errors import InputError
from polyfed.models import split_network

SHAPE, CLASSES = (1, 8, 8), 3


class WithFc(nn.Module):
    """A convolution, batch norm and dropout, then a last layer called fc that is not registered last."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(20, CLASSES)
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.hidden = nn.Linear(144, 20)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x)).relu().flatten(1)
        output: Tensor = self.fc(self.dropout(self.hidden(x).relu()))
        return output


def sequential(*end: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, CLASSES), *end)


def images(batch: int = 5) -> Tensor:
    return torch.randn(batch, *SHAPE, generator=torch.Generator().manual_seed(1))


def failure(network: nn.Module, **options: object) -> str:
    """The sentence with which a network is refused."""
    with pytest.raises(InputError) as caught:
        split_network(network, SHAPE, CLASSES, **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return str(caught.value)
