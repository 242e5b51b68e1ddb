"""A network must end in training as in evaluation: its extractor would do to features what it does to logits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from polyfed.models import split_network
from tests.models.support import CLASSES, SHAPE, WithFc, failure, images

CHANGES: list[Callable[[Tensor], Tensor]] = [
    lambda logits: nn.functional.dropout(logits, 0.5),
    lambda logits: nn.functional.dropout(logits, 0.5, inplace=True),
    lambda logits: nn.functional.log_softmax(logits, 1),
]


class Ending(WithFc):
    """Ends in training with what `end` makes of itself, of logits and of features."""

    def __init__(self, end: Callable[[Ending, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.end = end
        self.drop = nn.Dropout(0.5)
        self.activation = nn.ReLU()
        self.softmax = nn.Softmax(dim=1)

    def forward(self, x: Tensor) -> Tensor:
        features = self.hidden(self.norm(self.conv(x)).relu().flatten(1)).relu()
        logits: Tensor = self.fc(features)
        return self.end(self, logits, features) if self.training else logits


class Pooled(nn.Module):
    """Ends with the mean over places of a 1x1 convolution; `change` happens before or after it, in training only."""

    def __init__(self, change: Callable[[Tensor], Tensor], *, after: bool) -> None:
        super().__init__()
        self.change, self.after = change, after
        self.body = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Dropout(0.5))
        self.last = nn.Conv2d(6, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        places = self.last(self.body(x))
        if self.training and not self.after:
            places = self.change(places)
        logits: Tensor = places.mean((2, 3))
        return self.change(logits) if self.training and self.after else logits


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_logits_in_training_only_is_refused(change: Callable[[Tensor], Tensor]) -> None:
    sentence = failure(Ending(lambda net, logits, features: change(logits)))
    assert "because something in its forward method changes that layer's output in training" in sentence
    assert "its last linear layer 'fc'" in sentence


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("after", [True, False])
def test_so_is_what_changes_those_of_a_convolution(change: Callable[[Tensor], Tensor], after: bool) -> None:
    sentence = failure(Pooled(change, after=after))
    assert "because something in its forward method changes that layer's output in training" in sentence
    assert "its last convolution 'last'" in sentence


@pytest.mark.parametrize("end", [[nn.Dropout2d(0.5), nn.AdaptiveAvgPool2d(1)], [nn.AdaptiveAvgPool2d(1), nn.Dropout()]])
def test_dropout_after_a_convolution_at_the_end_is_refused(end: list[nn.Module]) -> None:
    """It would set features to zero instead of logits."""
    network = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Conv2d(6, CLASSES, 1), *end, nn.Flatten())
    number = next(place for place, layer in enumerate(network) if isinstance(layer, nn.Dropout | nn.Dropout2d))
    assert f"because '{number}' changes that layer's output in training: return the mean of" in failure(network)


def test_a_convolution_at_the_end_that_is_the_same_in_training_is_split() -> None:
    network = Pooled(lambda logits: logits, after=True)
    split = split_network(network, SHAPE, CLASSES).eval()
    torch.testing.assert_close(split(images()), network.eval()(images()))


def test_a_head_that_is_called_again_in_training_is_named_as_the_reason() -> None:
    sentence = failure(Ending(lambda net, logits, features: logits + net.fc(2 * features)))
    assert "because it calls that layer 2 times in training and returns none of these outputs as it is" in sentence
    assert "something in its forward method" not in sentence


def test_a_second_call_that_does_not_change_the_output_does_no_harm() -> None:
    def end(net: Ending, logits: Tensor, features: Tensor) -> Tensor:
        net.fc(2 * features)
        return logits

    split = split_network(Ending(end), SHAPE, CLASSES).train()
    assert split.head_name == "fc" and bool((split.features(images()) >= 0).all())


def test_a_head_that_is_called_twice_in_evaluation_too_is_named_as_the_reason() -> None:
    class Twice(WithFc):
        def forward(self, x: Tensor) -> Tensor:
            features = self.hidden(self.norm(self.conv(x)).relu().flatten(1))
            output: Tensor = self.fc(features) + self.fc(2 * features)
            return output

    assert "because it calls that layer 2 times and returns none of these outputs as it is" in failure(Twice())


def test_a_head_that_is_not_called_in_training_is_named_as_the_reason() -> None:
    class Other(WithFc):
        def __init__(self) -> None:
            super().__init__()
            self.trained = nn.Conv1d(1, CLASSES, 144)

        def forward(self, x: Tensor) -> Tensor:
            if not self.training:
                return super().forward(x)
            logits: Tensor = self.trained(self.norm(self.conv(x)).flatten(1)[:, None]).flatten(1)
            return logits

    assert "because it does not call that layer in training" in failure(Other())


@pytest.mark.parametrize("layer", ["drop", "activation", "softmax"])
def test_a_layer_that_follows_in_training_only_is_refused(layer: str) -> None:
    """It would stay where it is, and change features instead of logits."""
    sentence = failure(Ending(lambda net, logits, features: net.get_submodule(layer)(logits)))
    assert f"because '{layer}' follows that layer in training only" in sentence


def test_a_layer_that_follows_in_evaluation_only() -> None:
    """A softmax is left out anyway; an activation would become part of the head, in training too."""

    class Net(Ending):
        def __init__(self, layer: str) -> None:
            super().__init__(lambda net, logits, features: logits)
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            logits = super().forward(x)
            return logits if self.training else self.get_submodule(self.layer)(logits)

    assert "Softmax, which is left out" in split_network(Net("softmax"), SHAPE, CLASSES).remarks[0]
    assert "because 'activation' follows that layer in evaluation only" in failure(Net("activation"))
