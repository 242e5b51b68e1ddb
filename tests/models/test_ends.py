"""What may follow a network's last linear layer, what its output may look like, and what is left out."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from polyfed.models import SeededDropout, split_network
from tests.models.support import CLASSES, SHAPE, WithFc, failure, images, sequential


@pytest.mark.parametrize("end", [nn.Softmax(dim=1), nn.LogSoftmax(dim=1), nn.Sigmoid()])
def test_a_softmax_at_the_end_is_left_out_and_said_so(end: nn.Module) -> None:
    network = sequential(end).eval()
    split = split_network(network, SHAPE, CLASSES, name="Mine")
    torch.testing.assert_close(split(images()), network[:-1](images()))
    kind = type(end).__name__
    assert split.remarks == (f"Mine ends with {kind}, which is left out, because the losses need raw logits",)
    assert isinstance(split.head, nn.Linear) and split.head_name == "3"


@pytest.mark.parametrize("features", [None, 7])
def test_dropout_and_an_activation_after_the_last_layer_belong_to_the_head(features: int | None) -> None:
    """In training, dropout sets logits to zero, not features."""
    split = split_network(sequential(nn.ReLU(inplace=True), nn.Dropout(0.5)), SHAPE, CLASSES, features=features)
    assert [type(layer) for layer in split.head] == [nn.Linear, nn.ReLU, SeededDropout]  # type: ignore[union-attr]
    assert split.head[0].in_features == (features or 20)  # type: ignore[index,union-attr]
    assert not any(isinstance(layer, SeededDropout) for layer in split.extractor.modules())
    assert bool((split(images()) >= 0).all())
    if features is None:
        network = sequential(nn.ReLU(inplace=True), nn.Dropout(0.5)).eval()
        torch.testing.assert_close(split_network(network, SHAPE, CLASSES)(images()), network(images()))


def test_a_layer_that_is_also_used_elsewhere_can_not_be_moved() -> None:
    relu = nn.ReLU()
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 20), relu, nn.Linear(20, CLASSES), relu)
    assert "because '2' changes that layer's output" in failure(network)


def test_a_layer_with_weights_after_the_last_linear_one_is_refused_and_layers_are_shown() -> None:
    sentence = failure(sequential(nn.BatchNorm1d(CLASSES)))
    assert "because '4' changes that layer's output" in sentence
    assert "--set head=NAME; its last layers are '0' (Flatten), '1' (Linear 64 to 20), '2' (ReLU), " in sentence


class Several(WithFc):
    """Returns what `wrap` makes of logits and of features."""

    def __init__(self, wrap: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, x: Tensor) -> object:  # type: ignore[override]
        features = self.hidden(self.norm(self.conv(x)).relu().flatten(1)).relu()
        return self.wrap(self.fc(features), features)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda logits, features: (logits, features),
        lambda logits, features: [features, logits],
        lambda logits, features: {"features": features, "out": logits},
        lambda logits, features: {"logits": logits, "other": 2 * logits},
        lambda logits, features: {"loss": None, "logits": logits},
    ],
)
def test_logits_are_found_among_several_outputs(wrap: Callable[[Tensor, Tensor], object]) -> None:
    network = Several(wrap).eval()
    split = split_network(network, SHAPE, CLASSES)
    plain = Several(lambda logits, features: logits).eval()
    plain.load_state_dict(network.state_dict())
    for made in (split, deepcopy(split)):
        torch.testing.assert_close(made(images()), plain(images()))
    assert split.features(images()).shape == (5, 20)
    assert set(split.state_dict()) == set(split_network(plain, SHAPE, CLASSES).state_dict())
    assert split_network(network, SHAPE, CLASSES, features=6)(images()).shape == (5, CLASSES)


def test_outputs_among_which_two_can_be_logits_are_refused() -> None:
    network = Several(lambda logits, features: (logits, 2 * logits))
    assert "type tuple in which 0 and 1 can be that: return the logits alone" in failure(network)
    assert split_network(network, SHAPE, CLASSES, head="fc").head_name == "fc"


def squeezed(*between: nn.Module) -> nn.Sequential:
    convolution = nn.Conv2d(6, CLASSES, 1)
    return nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), convolution, *between, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def test_a_convolution_at_the_end_becomes_a_linear_head() -> None:
    """The mean of w · x + b over places is w · (mean of x) + b."""
    network = squeezed()
    split = split_network(network, SHAPE, CLASSES, name="Mine")
    assert isinstance(split.head, nn.Linear) and split.feature_size == 6
    torch.testing.assert_close(split(images()), network(images()))
    assert torch.equal(split.head.weight, network[2].weight.flatten(1))
    assert split.remarks == ("the last convolution of Mine, '2', is a linear head on the mean over places",)
    assert split_network(network, SHAPE, CLASSES, features=4).features(images()).shape == (5, 4)


def test_an_activation_after_that_convolution_is_left_out_and_said_so() -> None:
    network = squeezed(nn.ReLU(inplace=True))
    split = split_network(network, SHAPE, CLASSES, name="Mine")
    plain = squeezed()
    plain[0].load_state_dict(network[0].state_dict())
    plain[2].load_state_dict(network[2].state_dict())
    torch.testing.assert_close(split(images()), plain(images()))
    assert "Mine applies ReLU to its logits, which is left out" in split.remarks[1]


def test_squeezenet_is_split() -> None:
    from torchvision.models import squeezenet1_1

    split = split_network(squeezenet1_1(num_classes=7), (3, 64, 64), 7)
    assert split.feature_size == 512 and isinstance(split.head, nn.Linear)
    assert split(torch.zeros(2, 3, 64, 64)).shape == (2, 7)


class EndsWithSoftmax(WithFc):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).softmax(dim=1)


def test_a_softmax_in_the_forward_method_is_refused() -> None:
    assert "something in its forward method changes that layer's output" in failure(EndsWithSoftmax())
