"""The families of networks with batch norm, in cohorts: residual, with separable filters, with branches."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyfed.engines.stacked import convolutions, layers, norms
from tests import support
from tests.engines.test_batch_norm import HERE, assert_agree, shortened, train_both

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def normed(channels: int, out: int, size: int, **options: Any) -> nn.Sequential:
    """A convolution with batch norm."""
    return nn.Sequential(nn.Conv2d(channels, out, size, bias=False, **options), nn.BatchNorm2d(out))


class Family(nn.Module):
    """A stem, a body of some kind with 6 channels in and out, and the mean of each channel."""

    def __init__(self, channels: int, classes: int, body: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Sequential(normed(channels, 6, 3, stride=2, padding=1), nn.ReLU(inplace=True))
        self.body = body
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.out = nn.Linear(6, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.body(self.stem(x)))
        logits: Tensor = self.out(x.view(len(x), -1))
        return logits


class Block(nn.Module):
    """As in ResNets: two convolutions beside a shortcut with a stride."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = normed(6, 6, 3, stride=2, padding=1), normed(6, 6, 3, padding=1)
        self.shortcut = normed(6, 6, 1, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.relu_(self.first(x)))
        y += self.shortcut(x)
        return torch.relu(y)


class Separable(nn.Module):
    """As in MobileNet v2: more channels, a filter for each, fewer channels."""

    def __init__(self) -> None:
        super().__init__()
        wider, each = normed(6, 12, 1), normed(12, 12, 3, padding=1, groups=12)
        self.layers = nn.Sequential(wider, nn.ReLU6(inplace=True), each, nn.ReLU6(inplace=True), normed(12, 6, 1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.layers(x)
        return y


class Branches(nn.Module):
    """As in GoogLeNet: branches side by side, one of them with max-pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = normed(6, 2, 1), nn.Sequential(normed(6, 3, 1), nn.ReLU(), normed(3, 2, 3, padding=1))
        self.pooled = nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1, ceil_mode=True), normed(6, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([torch.relu(branch(x)) for branch in (self.near, self.far, self.pooled)], 1)


def residual(in_channels: int, classes: int) -> nn.Module:
    return Family(in_channels, classes, nn.Sequential(nn.MaxPool2d(2, stride=1), Block()))


def separable(in_channels: int, classes: int) -> nn.Module:
    return Family(in_channels, classes, Separable())


def branching(in_channels: int, classes: int) -> nn.Module:
    return Family(in_channels, classes, Branches())


FAMILIES = (residual, separable, branching)


@pytest.fixture(autouse=True)
def _no_loops_over_clients() -> Iterator[None]:
    """`vmap` warns where it has no rule; the plain loop would train such a network."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*performance drop.*")
        yield


@pytest.mark.parametrize("network", FAMILIES)
@pytest.mark.parametrize("method", ["fedtgp", {"name": "pfedes", "proxy": f"{HERE}:NormedProxy"}], ids=str)
def test_families_agree_with_the_plain_loop(tmp_path: Path, network: Any, method: Any) -> None:
    """Uneven clients, so that last batches are short; pFedES trains and rests both its networks, phase by phase."""
    notes = assert_agree(
        tmp_path, method, models=(network,), clients=3, rounds=2, lr=0.02, partition="dirichlet", alpha=0.7,
        batch_size=9, device=DEVICE, tf32=False, training={"momentum": 0.5, "weight_decay": 1e-2},
    )  # fmt: skip
    assert notes == []


def assert_rounds_agree(network: Any, kept: Sequence[int]) -> None:
    clients = support.population("standalone", models=(network,), clients=len(kept), device=DEVICE, tf32=False)
    actual, expected = train_both(shortened(clients, kept))
    assert [reply.notes for reply in actual] == [reply.notes for reply in expected]
    assert [reply.loss for reply in actual] == pytest.approx([reply.loss for reply in expected], nan_ok=True, rel=1e-4)


@pytest.mark.parametrize("kept", [(16, 16, 16), (16, 9, 3), (17, 9, 1)], ids=str)
def test_equal_and_short_batches_and_single_samples(kept: Sequence[int]) -> None:
    """Batches of 8: all full; of 8, 8 and 1, 3; of 8, 8 and 1, 8 and 1, 1, where single samples are left out."""
    assert_rounds_agree(residual, kept)


@pytest.mark.skipif(not find_spec("triton"), reason="no Triton")
@pytest.mark.parametrize("network", FAMILIES)
def test_families_on_our_kernels(monkeypatch: pytest.MonkeyPatch, network: Any) -> None:
    """As on a GPU: every convolution by products, a short batch, and a client that is left alone.

    The kernels of batch norm take long to interpret, and have tests of their own.
    """
    layers.kernels()
    monkeypatch.setattr(layers, "on_gpu", lambda x: True)
    monkeypatch.setattr(convolutions, "MOST_CHANNELS", (0, 0))
    monkeypatch.setattr(norms, "_way", lambda x: norms)
    assert_rounds_agree(network, (13, 8))  # of two values, batch norm makes two signs: too steep to compare
