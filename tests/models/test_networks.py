"""The networks by name: their layers, and the numbers of parameters that the papers and their code state."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from polyfed.errors import InputError
from polyfed.models import (
    GROUP_TITLES,
    GROUPS,
    NETWORKS,
    ProxyExtractor,
    SplitNetwork,
    default_auxiliary,
    default_features,
    parameter_count,
    resolve,
)
from polyfed.models.networks import convolutional

CIFAR, MNIST = (3, 32, 32), (1, 28, 28)


def shapes_only(name: str, input_shape: tuple[int, ...], classes: int, features: int | None = None) -> SplitNetwork:
    """A network without values, so that the largest ones cost nothing."""
    with torch.device("meta"):
        return resolve(name)[0].build(input_shape, classes, features)


@pytest.mark.parametrize(
    ("name", "cifar10", "cifar100", "mnist", "padded_mnist"),
    [
        ("cnn1", 2_621_558, 2_666_648, 2_044_758, 2_620_758),
        ("cnn2", 1_815_142, 1_860_232, 1_526_342, 1_814_342),
        ("cnn3", 1_320_558, 1_365_648, 1_031_758, 1_319_758),
        ("cnn4", 1_060_358, 1_105_448, 829_158, 1_059_558),
        ("cnn5", 670_058, 715_148, 525_258, 669_258),
    ],
)
def test_the_five_cnns(name: str, cifar10: int, cifar100: int, mnist: int, padded_mnist: int) -> None:
    assert parameter_count(shapes_only(name, CIFAR, 10)) == cifar10
    assert parameter_count(shapes_only(name, CIFAR, 100)) == cifar100
    assert parameter_count(shapes_only(name, MNIST, 10)) == mnist
    assert parameter_count(shapes_only(name, (1, 32, 32), 10)) == padded_mnist


def test_the_layers_of_cnn1() -> None:
    network = shapes_only("cnn1", CIFAR, 10)
    counts = {name: parameter_count(layer) for name, layer in network.extractor.named_children()}
    assert {name: count for name, count in counts.items() if count} == {
        "conv1": 1_216,
        "conv2": 12_832,
        "fc1": 1_602_000,
        "fc2": 1_000_500,
    }
    assert parameter_count(network.head) == 5_010
    assert network.feature_size == 500


@pytest.mark.parametrize(
    ("name", "features", "parameters"),
    [
        ("cnn", 512, 873_408),
        ("googlenet", 1024, 5_599_904),
        ("mobilenet_v2", 1280, 2_223_872),
        ("resnet4", 64, 83_520),
        ("resnet6", 128, 313_664),
        ("resnet8", 256, 1_232_704),
        ("resnet10", 512, 4_905_792),
        ("resnet18", 512, 11_176_512),
        ("resnet34", 512, 21_284_672),
        ("resnet50", 2048, 23_508_032),
        ("resnet101", 2048, 42_500_160),
        ("resnet152", 2048, 58_143_808),
        ("vit_b_16", 768, 85_651_200),
        ("vit_b_32", 768, 87_418_368),
    ],
)
def test_extractors_of_the_fedtgp_setting(name: str, features: int, parameters: int) -> None:
    own = shapes_only(name, CIFAR, 10)
    assert (own.feature_size, parameter_count(own.extractor)) == (features, parameters)
    pooled = shapes_only(name, CIFAR, 10, features=512)
    assert (pooled.feature_size, parameter_count(pooled.extractor)) == (512, parameters)
    images = torch.zeros(2, *CIFAR, device="meta")
    assert pooled.eval().features(images).shape == (2, 512)
    assert pooled(images).shape == (2, 10)


@pytest.mark.parametrize(("shape", "parameters"), [((3, 64, 64), 5_592_000), (MNIST, 576_896)])
def test_the_4_layer_cnn_on_other_images(shape: tuple[int, ...], parameters: int) -> None:
    assert parameter_count(shapes_only("cnn", shape, 10).extractor) == parameters


@pytest.mark.parametrize(("classes", "parameters"), [(10, 5_130), (100, 51_300), (102, 52_326), (200, 102_600)])
def test_linear_heads(classes: int, parameters: int) -> None:
    head = shapes_only("resnet50", CIFAR, classes, features=512).head
    assert isinstance(head, nn.Linear)
    assert parameter_count(head) == parameters


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("cnn", 51_300), ("cnn+mlp512", 313_956), ("cnn+mlp256", 157_028), ("cnn+mlp128", 78_564)],
)
def test_the_four_heads(name: str, parameters: int) -> None:
    network = shapes_only(name, CIFAR, 100)
    assert parameter_count(network.head) == parameters
    assert not isinstance(list(network.head.modules())[-1], nn.ReLU)


def test_the_head_of_vision_transformers_has_a_hidden_layer_with_tanh() -> None:
    head = shapes_only("vit_b_16", CIFAR, 10, features=512).head
    assert [type(layer) for layer in head.children()] == [nn.Linear, nn.Tanh, nn.Linear]
    assert parameter_count(head) == 512 * 768 + 768 + 768 * 10 + 10


def test_the_auxiliary_network_of_htfe8() -> None:
    assert parameter_count(shapes_only(default_auxiliary("htfe8") or "", CIFAR, 100, features=512)) == 924_708


@pytest.mark.parametrize(
    "name", [name for name in NETWORKS if not name.startswith(("vit", "signal", "text", "tabular"))]
)
def test_any_number_of_channels(name: str) -> None:
    images = torch.zeros(2, 1, 28, 28, device="meta")
    assert shapes_only(name, MNIST, 10).eval()(images).shape == (2, 10)
    assert shapes_only(name, (4, 32, 32), 10).eval()(torch.zeros(2, 4, 32, 32, device="meta")).shape == (2, 10)


def test_a_vision_transformer_on_one_channel() -> None:
    network = shapes_only("vit_b_16", (1, 48, 48), 10)
    assert network.eval()(torch.zeros(2, 1, 48, 48, device="meta")).shape == (2, 10)


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("cnn1", (1, 8, 8), "cnn1 needs images of at least 16x16 pixels"),
        ("cnn", (3, 32, 15), "cnn needs images of at least 16x16 pixels"),
        ("googlenet", (3, 14, 14), "at least 15x15 pixels"),
        ("vit_b_16", MNIST, "square images"),
        ("resnet18", (784,), "(channels, height, width)"),
        ("resnet4", (0, 8, 8), "(channels, height, width)"),
    ],
)
def test_images_that_do_not_fit_are_refused(name: str, shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(InputError) as caught:
        shapes_only(name, shape, 10)
    assert words in str(caught.value)


@pytest.mark.parametrize(("name", "side"), [("cnn1", 16), ("googlenet", 15), ("resnet18", 8), ("mobilenet_v2", 8)])
def test_the_smallest_images(name: str, side: int) -> None:
    network = shapes_only(name, (1, side, side), 10).eval()
    assert network(torch.zeros(2, 1, side, side, device="meta")).shape == (2, 10)


def test_groups_have_the_members_of_the_papers() -> None:
    assert {group: len(members) for group, members in GROUPS.items()} == {
        "papers": 5,
        "htfe2": 2,
        "htfe3": 3,
        "htfe4": 4,
        "htfe5": 5,
        "htfe8": 8,
        "htfe9": 9,
        "res34-htc4": 4,
        "htfe8-htc4": 8,
        "htm10": 10,
        "signal4": 4,
        "text4": 4,
        "tabular4": 4,
    }
    assert GROUPS.keys() == GROUP_TITLES.keys()
    assert GROUPS["htfe9"][:5] == ["resnet4", "resnet6", "resnet8", "resnet10", "resnet18"]
    assert GROUPS["res34-htc4"] == ["resnet34", "resnet34+mlp512", "resnet34+mlp256", "resnet34+mlp128"]
    assert GROUPS["htfe8-htc4"][4:6] == ["resnet34", "resnet50+mlp512"]
    for group, members in GROUPS.items():
        assert [architecture.name for architecture in resolve(group)] == members


def test_groups_prescribe_their_number_of_features() -> None:
    equal = {"papers", "signal4", "text4", "tabular4"}
    assert {default_features(group) for group in equal} == {None}
    assert {default_features(group) for group in GROUPS.keys() - equal} == {512}
    assert default_features("resnet18") is None
    assert default_features(["cnn1", "HtFE8"]) == 512
    assert default_features(nn.Linear) is None


@pytest.mark.parametrize(("shape", "parameters"), [(CIFAR, 443), (MNIST, 153)])
def test_the_proxy_extractor(shape: tuple[int, ...], parameters: int) -> None:
    proxy = ProxyExtractor(shape)
    images = torch.randn(2, *shape)
    assert parameter_count(proxy) == parameters
    assert proxy(images).shape == images.shape
    assert proxy(images).min() >= 0


def test_the_activation_of_the_proxy_extractor() -> None:
    images = 10 * torch.randn(4, *MNIST)
    plain, tanh = ProxyExtractor(MNIST, activation="none"), ProxyExtractor(MNIST, activation="tanh")
    tanh.load_state_dict(plain.state_dict())
    torch.testing.assert_close(plain(images).tanh(), tanh(images))
    with pytest.raises(InputError, match="unknown activation 'sigmoid'"):
        ProxyExtractor(MNIST, activation="sigmoid")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="at least 1 filter"):
        ProxyExtractor(MNIST, filters=0)


def test_relu_after_pooling_gives_the_numbers_of_relu_before() -> None:
    torch.manual_seed(0)
    network = convolutional((3, 32, 32), (4, 6), (20, 10), "cnn")
    usual = nn.Sequential(
        network.conv1, nn.ReLU(), nn.MaxPool2d(2), network.conv2, nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), network.fc1, nn.ReLU(), network.fc2, nn.ReLU(),
    )  # fmt: skip
    x = torch.randn(8, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    results = []
    for net in (network, usual):
        features = net(x)
        results.append([features, *torch.autograd.grad(features.square().sum(), list(network.parameters()))])
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))
