"""Any network with a linear end is split into an extractor and a head, and computes what it computed before."""

from __future__ import annotations

import random
from copy import deepcopy

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from polyfed.errors import InputError
from polyfed.models import FeaturePool, SeededDropout, SplitNetwork, resolve, split_network
from tests.models.support import CLASSES, SHAPE, WithFc, failure, images, sequential


@pytest.mark.parametrize("network", [sequential(), WithFc(), nn.Sequential(WithFc())])
def test_the_function_is_unchanged(network: nn.Module) -> None:
    network.eval()
    split = split_network(network, SHAPE, CLASSES)
    assert split.feature_size == 20
    assert split.features(images()).shape == (5, 20)
    assert isinstance(split.head, nn.Linear)
    torch.testing.assert_close(split(images()), network(images()))
    torch.testing.assert_close(split.head(split.features(images())), network(images()))


def test_names_say_which_part_a_parameter_belongs_to() -> None:
    names = {name for name, _ in split_network(WithFc(), SHAPE, CLASSES).named_parameters()}
    parts = ["conv", "norm", "hidden"]
    expected = {f"extractor.{part}.{kind}" for part in parts for kind in ("weight", "bias")}
    assert names == expected | {"head.weight", "head.bias"}


def test_the_network_given_is_left_untouched() -> None:
    network = WithFc().train()
    network.norm.eval()
    before, random = deepcopy(network.state_dict()), torch.random.get_rng_state()
    split = split_network(network, SHAPE, CLASSES)
    assert isinstance(network.fc, nn.Linear)
    assert isinstance(network.dropout, nn.Dropout)
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())
    assert torch.equal(random, torch.random.get_rng_state())
    assert split.training
    assert split.extractor.training
    assert not split.extractor.norm.training  # type: ignore[union-attr]


class Counting(nn.Module):
    """Counts its calls in a buffer, even in evaluation mode, and draws random numbers."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.fc = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        torch.rand(1)
        output: Tensor = self.fc(x.flatten(1))
        return output


def test_the_dry_run_leaves_buffers_and_the_global_generator_alone() -> None:
    network = Counting()
    random = torch.random.get_rng_state()
    assert split_network(network, SHAPE, CLASSES).state_dict()["extractor.calls"] == 0
    assert torch.equal(random, torch.random.get_rng_state())


def test_dropout_is_made_reproducible() -> None:
    extractor = split_network(WithFc(), SHAPE, CLASSES).extractor
    assert isinstance(extractor.dropout, SeededDropout)


def test_a_head_can_be_named_and_can_have_several_layers() -> None:
    network = nn.Sequential()
    network.add_module("body", nn.Flatten())
    network.add_module("top", nn.Sequential(nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, CLASSES)))
    split = split_network(network, SHAPE, CLASSES, head="top")
    assert split.feature_size == 64
    assert isinstance(split.head, nn.Sequential)
    torch.testing.assert_close(split(images()), network(images()))


def test_a_head_with_a_weight_norm_is_found() -> None:
    head = nn.utils.parametrizations.weight_norm(nn.Linear(20, 3))
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.ReLU(), head)
    assert split_network(network, (1, 8, 8), 3).feature_size == 20
    with pytest.raises(InputError, match=r"its last layers are '0' .Flatten., .*, '3' .Linear 20 to 3., '4' .Batch"):
        split_network(nn.Sequential(*network, nn.BatchNorm1d(3)), (1, 8, 8), 3)


def test_a_head_of_ones_own_that_gives_way_to_a_linear_layer_is_noted() -> None:
    network = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 20), nn.Sequential(nn.Linear(20, 9), nn.ReLU(), nn.Linear(9, 3))
    )
    assert not split_network(network, (1, 8, 8), 3, head="2").remarks
    (remark,) = split_network(network, (1, 8, 8), 3, head="2", features=10, name="Own").remarks
    assert remark == "the head '2' of Own (Sequential) is a linear layer here, because it has 10 features instead of 20"
    assert not split_network(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.Linear(20, 3)), (1, 8, 8), 3, features=10
    ).remarks


@pytest.mark.parametrize("shape", ["[batch]", "[batch, 1]"])
def test_a_single_output_for_two_classes_is_refused_with_the_remedy(shape: str) -> None:
    last = [nn.Flatten(0)] if shape == "[batch]" else []
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.Linear(20, 1), *last)
    with pytest.raises(InputError) as error:
        split_network(network, (1, 8, 8), 2, name="Own")
    assert f"Own returns outputs of shape {shape}, but 2 classes need [batch, 2]: give its" in str(error.value)
    assert "2 outputs, one for each class" in str(error.value)


def test_a_head_that_has_two_names_is_replaced_under_both() -> None:
    network = WithFc().eval()
    network.alias = network.fc
    torch.testing.assert_close(split_network(network, SHAPE, CLASSES)(images()), network(images()))


def test_a_single_linear_layer_is_a_head_without_extractor() -> None:
    split = split_network(nn.Linear(64, CLASSES), (64,), CLASSES)
    assert split.feature_size == 64
    assert isinstance(split.extractor, nn.Identity)


def test_lazy_layers_get_their_size_from_the_task() -> None:
    network = nn.Sequential(nn.Flatten(), nn.LazyLinear(7), nn.ReLU(), nn.LazyLinear(CLASSES))
    assert split_network(network, SHAPE, CLASSES).feature_size == 7


@pytest.mark.parametrize("features", [10, 12, 40])
def test_features_are_pooled_on_request(features: int) -> None:
    network = WithFc().eval()
    split = split_network(network, SHAPE, CLASSES, features=features)
    plain = split_network(network, SHAPE, CLASSES)
    assert split.feature_size == features
    torch.testing.assert_close(split.features(images()), FeaturePool(features)(plain.features(images())))
    assert split(images()).shape == (5, CLASSES)
    assert list(split.state_dict()) == list(plain.state_dict())


def test_features_are_projected_on_request() -> None:
    split = split_network(WithFc(), SHAPE, CLASSES, features=11, match="project")
    assert split.state_dict()["extractor.fc.weight"].shape == (11, 20)
    assert split(images()).shape == (5, CLASSES)


def test_a_number_of_features_that_fits_keeps_the_head() -> None:
    network = sequential()
    split = split_network(network, SHAPE, CLASSES, features=20)
    assert torch.equal(split.state_dict()["head.weight"], network.state_dict()["3.weight"])


def test_deep_copies_share_no_storage() -> None:
    split = split_network(WithFc(), SHAPE, CLASSES, features=10)
    copied = deepcopy(split)
    places = {tensor.data_ptr() for tensor in split.state_dict().values()}
    assert places.isdisjoint(tensor.data_ptr() for tensor in copied.state_dict().values())
    copied.eval(), split.eval()
    assert torch.equal(copied(images()), split(images()))


def test_a_split_network_is_used_as_it_is_once_checked() -> None:
    own = SplitNetwork(nn.Sequential(nn.Flatten(), nn.Linear(64, 6)), nn.Linear(6, CLASSES), 6)
    assert split_network(own, SHAPE, CLASSES).feature_size == 6
    assert "already split with 6 features, but features is set to 5" in failure(own, features=5)
    wrong = SplitNetwork(nn.Flatten(), nn.Linear(64, CLASSES), 6)
    assert "returns features [2, 64] for 2 images, but it should return [2, 6]" in failure(wrong)
    wrong = SplitNetwork(nn.Flatten(), nn.Linear(64, 5), 64)
    assert "returns logits [2, 5] for 2 images, but it should return [2, 3]" in failure(wrong)


class Reuses(nn.Module):
    """Its head is the transpose-free twin of an earlier layer: both have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, CLASSES, bias=False), nn.Linear(64, CLASSES, bias=False)
        self.widen = nn.Linear(CLASSES, 64)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.second(self.widen(self.first(x.flatten(1))))
        return output


def test_a_head_that_shares_its_weight_gets_its_own() -> None:
    network = Reuses()
    split = split_network(network, SHAPE, CLASSES, name="Mine")
    assert {name for name, _ in split.named_parameters()} == {
        "extractor.first.weight",
        "extractor.widen.weight",
        "extractor.widen.bias",
        "head.weight",
    }
    torch.testing.assert_close(split(images()), network(images()))
    assert split.remarks[0].startswith("the head of Mine shares weights with its extractor; here each has its own")


class ReadsItsWeights(WithFc):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.fc.weight.abs().mean())


def test_a_network_that_needs_its_head_elsewhere_is_refused() -> None:
    assert "can't be split at its layer 'fc', because it fails without it: 'Identity' object" in failure(
        ReadsItsWeights()
    )


class CallsItTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.same(self.same(x.flatten(1)[:, :3]))
        return output


def test_a_head_that_is_called_twice_is_refused() -> None:
    assert "the two parts together return a different output" in failure(CallsItTwice())


def test_a_network_without_linear_layer_is_refused() -> None:
    assert "has no linear layer to split at" in failure(nn.Sequential(nn.Conv2d(1, CLASSES, 8), nn.Flatten()))


def test_the_wrong_number_of_classes_is_refused() -> None:
    sentence = failure(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), name="Mine")
    assert sentence.startswith("Mine returns outputs of shape [batch, 10], but 3 classes need [batch, 3]")
    assert "last linear layer '1'" in sentence


def test_the_wrong_input_shape_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        split_network(WithFc(), (3, 32, 32), CLASSES)
    assert "does not accept images of shape (3, 32, 32)" in str(caught.value)
    assert "in its layer 'conv'" in str(caught.value)


class AveragesLogits(nn.Module):
    """Applies its last layer to every row of an image, and only then takes the mean."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(x[:, 0, : self.rows])
        return logits.mean(dim=1)


def test_features_that_are_not_one_row_per_image_are_refused() -> None:
    assert "something in its forward method changes that layer's output" in failure(AveragesLogits(rows=8))
    assert "flatten what goes into its only layer" in failure(nn.Linear(8, CLASSES))
    unflattened = nn.Sequential()
    unflattened.add_module("top", nn.Sequential(nn.Flatten(), nn.Linear(64, CLASSES)))
    sentence = failure(unflattened, head="top")
    assert "its head 'top', which receives [2, 1, 8, 8] for 2 images: it must receive one row of features" in sentence


def test_an_output_that_is_not_a_tensor_is_refused() -> None:
    class Text(WithFc):
        def forward(self, x: Tensor) -> str:  # type: ignore[override]
            return "a logit"

    assert "returns a value of type str" in failure(Text())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"head": "fcc"}, "did you mean 'fc'?"),
        ({"head": "unused"}, "never calls its layer 'unused'"),
        ({"features": 0}, "the number of features must be at least 1, not 0"),
        ({"match": "pol", "features": 5}, "did you mean 'pool'?"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, object], words: str) -> None:
    network = WithFc()
    network.unused = nn.Linear(2, 2)
    assert words in failure(network, **options)


def test_many_clients_can_be_computed_at_once() -> None:
    """A vectorized engine stacks the parameters of clients; pooled features must allow that."""
    networks = [resolve("cnn5")[0].build((1, 16, 16), CLASSES, features=120) for _ in range(2)]
    parameters, buffers = stack_module_state(list(networks))
    x = torch.randn(2, 3, 1, 16, 16)

    def logits(parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
        output: Tensor = functional_call(networks[0], (parameters, buffers), (x,))
        return output

    together = vmap(logits)(parameters, buffers, x)
    for number, network in enumerate(networks):
        torch.testing.assert_close(together[number], network(x[number]), rtol=1e-4, atol=1e-5)


def test_a_network_that_draws_from_numpy_is_split_and_the_user_s_generators_are_left_alone() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x + float(np.random.rand()) + random.random()))  # type: ignore[no-any-return]

    np.random.seed(1)
    random.seed(1)
    expected = np.random.rand(), random.random()
    np.random.seed(1)
    random.seed(1)
    assert split_network(Noisy(), (4,), 2).feature_size == 3
    assert (np.random.rand(), random.random()) == expected
