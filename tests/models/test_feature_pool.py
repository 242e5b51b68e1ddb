"""Pooling along the feature axis brings every network to the same number of features."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import Tensor, nn

from polyfed.models import FeaturePool, resolve
from polyfed.models.features import match_layer


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
