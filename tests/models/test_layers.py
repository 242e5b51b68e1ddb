"""Dropout whose masks depend on its own generator alone; pooling that brings features to the same number."""

from __future__ import annotations

import math
from copy import deepcopy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import Tensor, nn

from polyfed.models import FeaturePool, SeededDropout, resolve, seed_dropout, set_generator
from polyfed.models.layers import match_layer


def seeded(p: float = 0.5, dimensions: int = 0, seed: int = 7) -> SeededDropout:
    dropout = SeededDropout(p, dimensions)
    dropout.generator = torch.Generator().manual_seed(seed)
    return dropout


def test_one_seed_gives_one_mask_whatever_the_global_generator_does() -> None:
    x = torch.ones(50)
    torch.manual_seed(1)
    first = seeded()(x)
    torch.manual_seed(2)
    torch.rand(5)
    assert torch.equal(first, seeded()(x))
    assert not torch.equal(first, seeded(seed=8)(x))


def test_the_global_generator_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    seeded()(torch.ones(50))
    assert torch.equal(before, torch.random.get_rng_state())


def test_without_a_generator_the_global_one_is_used() -> None:
    x, dropout = torch.ones(50), SeededDropout()
    torch.manual_seed(3)
    first = dropout(x)
    torch.manual_seed(3)
    assert torch.equal(first, dropout(x))


def test_kept_values_are_scaled_up() -> None:
    y = seeded(0.25)(torch.ones(10_000))
    assert set(y.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert y.mean().item() == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("dropout", [seeded(0.0), seeded(0.9).eval()])
def test_nothing_is_dropped_at_rate_0_and_in_evaluation(dropout: SeededDropout) -> None:
    x = torch.randn(20)
    assert dropout(x) is x


def test_everything_is_dropped_at_rate_1() -> None:
    assert seeded(1.0)(torch.randn(20)).abs().sum() == 0


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Dropout1d(), (4, 30, 5)),
        (nn.Dropout1d(), (30, 5)),
        (nn.Dropout2d(), (4, 30, 2, 3)),
        (nn.Dropout3d(), (4, 30, 2, 2, 2)),
        (nn.Dropout3d(), (30, 2, 2, 2)),
    ],
)
def test_whole_channels_are_dropped(layer: nn.Module, shape: tuple[int, ...]) -> None:
    replaced = seed_dropout(layer)
    assert isinstance(replaced, SeededDropout)
    axes = shape.index(30) + 1
    channels = replaced(torch.ones(shape)).flatten(axes)
    assert torch.equal(channels.amin(-1), channels.amax(-1))
    assert 0 < (channels[..., 0] == 0).float().mean() < 1


def test_dropout2d_reads_three_axes_as_batch_channel_length_like_torch() -> None:
    rows = seed_dropout(nn.Dropout2d())(torch.ones(4, 30, 5))
    assert torch.equal(rows.amin(-1), rows.amax(-1))
    assert not torch.equal(rows.amin(1), rows.amax(1))


class Shares(nn.Module):
    """One dropout layer under two names, and one that is not torch's own."""

    class Special(nn.Dropout):
        pass

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Dropout(0.3)
        self.second = self.first
        self.special = self.Special()
        self.deep = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.2).eval())

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_every_dropout_layer_of_a_tree_is_replaced_and_sharing_stays() -> None:
    network = Shares()
    names = list(network.state_dict())
    assert seed_dropout(network) is network
    assert isinstance(network.first, SeededDropout)
    assert network.first is network.second
    assert network.first.p == 0.3
    assert type(network.special) is Shares.Special
    assert isinstance(network.deep[1], SeededDropout)
    assert not network.deep[1].training
    assert list(network.state_dict()) == names


def test_a_copy_continues_from_the_state_of_the_generator_on_its_own() -> None:
    dropout, x = seeded(), torch.ones(50)
    dropout(x)
    copied = deepcopy(dropout)
    assert copied.generator is not dropout.generator
    assert torch.equal(dropout(x), copied(x))


def test_set_generator_reaches_the_dropout_of_a_catalogue_network() -> None:
    network = resolve("mobilenet_v2")[0].build((3, 32, 32), 3).train()
    layers = [layer for layer in network.modules() if isinstance(layer, SeededDropout)]
    assert [layer.p for layer in layers] == [0.2]
    generator = torch.Generator()
    set_generator(network, generator)
    assert all(layer.generator is generator for layer in layers)
    x = torch.randn(2, 3, 32, 32)
    generator.manual_seed(4)
    first = network(x)
    generator.manual_seed(4)
    assert torch.equal(first, network(x))
    set_generator(network, None)
    assert layers[0].generator is None


def windows(x: Tensor, features: int) -> Tensor:
    """Feature j is the mean of the features from floor(D j / K) up to ceil(D (j + 1) / K)."""
    size = x.shape[1]
    edges = [(size * j // features, math.ceil(size * (j + 1) / features)) for j in range(features)]
    return torch.stack([x[:, start:end].mean(dim=1) for start, end in edges], dim=1)


def test_1024_features_become_512_means_of_pairs() -> None:
    x = torch.randn(2, 1024)
    torch.testing.assert_close(FeaturePool(512)(x), (x[:, 0::2] + x[:, 1::2]) / 2)


def test_64_features_become_512_by_repeating_each_8_times() -> None:
    x = torch.randn(2, 64)
    torch.testing.assert_close(FeaturePool(512)(x), x.repeat_interleave(8, dim=1))


def test_1280_features_become_512_over_windows_of_3_that_overlap() -> None:
    x = torch.arange(1280.0).unsqueeze(0)
    assert FeaturePool(512)(x)[0, :2].tolist() == [1.0, 3.0]  # means of features 0, 1, 2 and of 2, 3, 4


@settings(max_examples=40, deadline=None)
@given(some.integers(1, 70), some.integers(1, 70), some.integers(0, 3))
def test_pooling_is_the_mean_over_windows(size: int, features: int, batch: int) -> None:
    x = torch.randn(batch, size)
    torch.testing.assert_close(FeaturePool(features)(x), windows(x, features))


def test_equal_numbers_need_no_layer() -> None:
    assert isinstance(match_layer(512, 512), nn.Identity)
    assert isinstance(match_layer(512, None), nn.Identity)


def test_a_projection_is_learned() -> None:
    network = resolve("resnet4")[0].build((1, 16, 16), 3, features=10, match="project")
    assert network.state_dict()["extractor.match.weight"].shape == (10, 64)
    assert network.features(torch.zeros(2, 1, 16, 16)).shape == (2, 10)
