"""Names, groups and users' own networks become architectures, and clients get one each."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor, nn

from polyfed.assemble import assemble
from polyfed.config import experiment
from polyfed.errors import InputError
from polyfed.models import GROUPS, Architecture, SplitNetwork, assign, default_auxiliary, resolve, smallest
from polyfed.shapes import TokenShape
from tests import support

SHAPE, CLASSES = (1, 16, 16), 4


class Mine(nn.Module):
    def __init__(self, in_channels: int, num_classes: int, channels: int = 5) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, channels, 3)
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.fc(self.conv(x).mean(dim=(2, 3)))
        return output


def names(models: object) -> list[str]:
    return [architecture.name for architecture in resolve(models)]  # type: ignore[arg-type]


def test_names_groups_and_lists() -> None:
    assert names("papers") == ["cnn1", "cnn2", "cnn3", "cnn4", "cnn5"]
    assert names("cnn1, CNN3") == ["cnn1", "cnn3"]
    assert names(["resnet18+mlp256", "HtFE2"]) == ["resnet18+mlp256", "cnn", "resnet18"]
    assert names([Mine, "cnn1", resolve("cnn2")[0]]) == ["Mine", "cnn1", "cnn2"]
    assert names(partial(Mine, channels=3)) == ["Mine"]
    assert names(lambda classes: None) == ["factory"]


def test_equal_descriptions_give_equal_architectures() -> None:
    assert resolve("resnet34+mlp256") == resolve("ResNet34+mlp256")
    assert resolve(Mine) == resolve(Mine)
    assert resolve("cnn1") != resolve("cnn2")
    assert len({*resolve("papers"), *resolve("cnn1")}) == 5


def test_different_networks_never_share_a_name() -> None:
    other = type("Mine", (Mine,), {})
    assert names([Mine, other, Mine]) == ["Mine", "Mine-2", "Mine"]


@pytest.mark.parametrize(
    ("models", "words"),
    [
        ("cnn1,resnet19", "unknown network 'resnet19': did you mean 'resnet1"),
        ("htfe-8", "did you mean 'htfe8'?"),
        ("cnn1+mlp255", "unknown head 'mlp255'"),
        ("no_such_module:Net", "module 'no_such_module' of 'no_such_module:Net' can't be imported"),
        ("torchvision.models:resnet17", "module 'torchvision.models' has no 'resnet17': did you mean 'resnet1"),
        (":Net", "write package.module:name"),
        ("", "no networks to choose from"),
        ([], "no networks to choose from"),
        (3, "a value of type int does not describe networks"),
    ],
)
def test_descriptions_that_name_nothing_are_refused(models: object, words: str) -> None:
    with pytest.raises(InputError) as caught:
        names(models)
    assert words in str(caught.value)


def test_two_builds_under_one_seed_are_equal() -> None:
    for description in ("cnn5", "resnet4", Mine):
        architecture = resolve(description)[0]
        torch.manual_seed(3)
        first = architecture.build(SHAPE, CLASSES, features=12)
        torch.manual_seed(3)
        second = architecture.build(SHAPE, CLASSES, features=12)
        third = architecture.build(SHAPE, CLASSES, features=12)
        for name, value in first.state_dict().items():
            assert torch.equal(value, second.state_dict()[name])
        assert not torch.equal(first.state_dict()["head.weight"], third.state_dict()["head.weight"])


def test_a_class_is_called_with_what_its_signature_names() -> None:
    network = resolve(Mine)[0].build((3, 16, 16), CLASSES)
    assert network.feature_size == 5
    assert network.state_dict()["extractor.conv.weight"].shape == (5, 3, 3, 3)
    assert network(torch.zeros(2, 3, 16, 16)).shape == (2, CLASSES)


def test_factories_with_other_signatures() -> None:
    def everything(input_shape: tuple[int, ...], classes: int, features: int = 9) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(input_shape[1] ** 2, features), nn.Linear(features, classes))

    def nothing() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(256, CLASSES))

    def hidden(**options: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(256, options["num_classes"]))

    def already(classes: int) -> nn.Module:
        return SplitNetwork(nn.Flatten(), nn.Linear(256, classes), 256)

    sizes = [
        resolve(factory)[0].build(SHAPE, CLASSES).feature_size for factory in (everything, nothing, hidden, already)
    ]
    assert sizes == [9, 256, 256, 256]
    assert resolve(everything)[0].build(SHAPE, CLASSES, features=7).feature_size == 7


def test_a_network_that_exists_is_copied_with_its_weights() -> None:
    network = Mine(1, CLASSES)
    first, second = (resolve(network)[0].build(SHAPE, CLASSES) for _ in range(2))
    assert torch.equal(first.state_dict()["head.weight"], network.fc.weight)
    assert torch.equal(first.state_dict()["head.weight"], second.state_dict()["head.weight"])
    assert first.state_dict()["head.weight"].data_ptr() != second.state_dict()["head.weight"].data_ptr()


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (lambda depth: None, "factory needs an argument 'depth'"),
        (lambda feature_size: None, "factory needs 'feature_size': set features to the number"),
        (lambda: 3, "factory must return a network (a torch.nn.Module), but it returns a value of type int"),
        (lambda classes: nn.Linear(classes, 1 // 0), "factory(classes=4) fails to build a network: integer division"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(256, 9)), "4 classes need [batch, 4]"),
    ],
)
def test_factories_that_fail_are_refused_in_one_sentence(factory: object, words: str) -> None:
    with pytest.raises(InputError) as caught:
        resolve(factory)[0].build(SHAPE, CLASSES)  # type: ignore[arg-type]
    assert words in str(caught.value)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current directory with a module of the user's own that is forgotten afterwards."""
    (tmp_path / "hospital_networks.py").write_text(
        "from torch import nn\n"
        "def small(classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(256, 6), nn.Linear(6, classes))\n"
        "several = [small, 'cnn5']\n"
    )
    (tmp_path / "broken_networks.py").write_text("raise ValueError('not today')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield tmp_path
    sys.modules.pop("hospital_networks", None)


def test_a_module_in_the_current_directory(folder: Path) -> None:
    architecture = resolve("hospital_networks:small")[0]
    assert architecture.name == "hospital_networks:small"
    assert architecture.build(SHAPE, CLASSES).feature_size == 6
    assert names("hospital_networks:several,cnn1") == ["small", "cnn5", "cnn1"]


def test_errors_of_the_users_modules_name_the_module(folder: Path) -> None:
    with pytest.raises(InputError, match="module 'broken_networks' .* can't be imported: not today"):
        resolve("broken_networks:small")
    with pytest.raises(InputError, match="has no 'smal': did you mean 'small'?"):
        resolve("hospital_networks:smal")


def test_factories_for_token_ids_are_given_their_vocabulary() -> None:
    seen = {}

    def reader(vocab_size: int, padding_idx: int, classes: int, channels: int = 1) -> nn.Module:
        seen.update(vocab_size=vocab_size, padding_idx=padding_idx, channels=channels)
        return nn.Sequential(nn.Embedding(vocab_size, 4, padding_idx=padding_idx), nn.Flatten(), nn.Linear(36, classes))

    network = resolve(reader)[0].build(TokenShape((9,), vocabulary=20, padding=3), CLASSES)
    assert seen == {"vocab_size": 20, "padding_idx": 3, "channels": 1}
    assert network(torch.full((2, 9), 19)).shape == (2, CLASSES)
    with pytest.raises(InputError, match="vocab_size"):
        resolve(reader)[0].build((9,), CLASSES)


def test_torchvision_by_address() -> None:
    with torch.device("meta"):
        assert resolve("torchvision.models:squeezenet1_1")[0].build((3, 32, 32), CLASSES).feature_size == 512
        assert resolve("torchvision.models:resnet18")[0].build((3, 32, 32), CLASSES).feature_size == 512


@given(some.integers(1, 30), some.integers(0, 5))
def test_assignment(clients: int, seed: int) -> None:
    choices = resolve("papers")
    assert assign(choices, clients) == [choices[client % 5] for client in range(clients)]
    drawn = assign(choices, clients, how="random", seed=seed)
    assert drawn == assign(choices, clients, how="random", seed=seed)
    assert len(drawn) == clients
    assert set(drawn) <= set(choices)


def test_random_assignment_depends_on_the_seed_and_uses_all() -> None:
    choices = resolve("papers")
    assert set(assign(choices, 200, how="random", seed=1)) == set(choices)
    assert assign(choices, 20, how="random", seed=1) != assign(choices, 20, how="random", seed=2)


def test_impossible_assignments_are_refused() -> None:
    with pytest.raises(InputError, match="at least one"):
        assign([], 3)
    with pytest.raises(InputError, match="at least 1, not 0"):
        assign(resolve("cnn1"), 0)
    with pytest.raises(InputError, match="did you mean 'cycle'"):
        assign(resolve("cnn1"), 2, how="cycl")  # type: ignore[arg-type]


class NeedsValues(Mine):
    """Reads a value while it is built, which a network without values can't give."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__(in_channels, num_classes)
        self.scale = self.fc.weight.abs().max().item()


def test_every_group_has_an_auxiliary_network() -> None:
    """The first of the group as in FedTGP's code, and the CNN where heads differ; cnn5 of the papers' five."""
    assert {group: default_auxiliary(group) for group in GROUPS} == {
        "papers": "cnn5", "htfe2": "cnn", "htfe3": "resnet10", "htfe4": "cnn", "htfe5": "googlenet", "htfe8": "cnn",
        "htfe9": "resnet4", "res34-htc4": "cnn", "htfe8-htc4": "cnn", "htm10": "cnn",
        "signal4": "signal_cnn4", "text4": "text_cnn", "tabular4": "tabular_mlp4",
    }  # fmt: skip
    assert default_auxiliary(["cnn1", "HTFE3"]) == "resnet10"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"models": "res34-htc4"}, "cnn"),
        ({"models": "htfe5", "clients": 2}, "googlenet"),
        ({"models": "htfe5", "clients": 2, "auxiliary": "cnn5"}, "cnn5"),
        ({"models": "resnet18,cnn4,cnn3"}, "cnn4"),
    ],
)
def test_the_auxiliary_network_is_the_group_s(settings: dict[str, Any], expected: str) -> None:
    """Of res34-htc4 it is no member; of htfe5 it is not the smallest; without a group it is the smallest."""
    config = experiment(**{"method": "standalone", "data": "python:tiny", "clients": 3, "device": "cpu", **settings})
    data = support.tiny_dataset(side=32, channels=3)
    assert assemble(config, data).task.auxiliary.name == expected


def test_the_smallest_architecture() -> None:
    assert smallest(resolve("papers"), (3, 32, 32), 10).name == "cnn5"
    assert smallest(resolve("htm10"), (3, 32, 32), 100, features=512).name == "cnn"
    assert smallest(resolve("htfe9"), (3, 32, 32), 10).name == "resnet4"
    random = torch.random.get_rng_state()
    assert smallest(resolve(["cnn1", NeedsValues]), SHAPE, CLASSES).name == "NeedsValues"
    assert torch.equal(random, torch.random.get_rng_state())


def test_impossible_builds_are_refused() -> None:
    architecture: Architecture = resolve("cnn1")[0]
    with pytest.raises(InputError, match="at least 1 class"):
        architecture.build(SHAPE, 0)
    with pytest.raises(InputError, match="features must be at least 1"):
        architecture.build(SHAPE, 2, features=0)
    with pytest.raises(InputError, match="did you mean 'project'"):
        architecture.build(SHAPE, 2, features=5, match="projekt")


def test_small_networks_learn() -> None:
    """Gradients reach every parameter, in both parts."""
    for name in ("cnn2", "resnet6", "cnn5+mlp128"):
        network = resolve(name)[0].build(SHAPE, CLASSES, features=30)
        loss = nn.functional.cross_entropy(network(torch.randn(3, *SHAPE)), torch.tensor([0, 1, 3]))
        loss.backward()  # type: ignore[no-untyped-call]
        assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters()), name


@pytest.mark.parametrize(
    ("models", "head", "words"),
    [
        ("papers", "fc", "head is 'fc', but the heads of cnn1, cnn2, cnn3, … are known: leave it out"),
        ("cnn2", {"mine": "fc"}, "but the head of cnn2 is known: leave it out"),
    ],
)
def test_a_head_of_a_network_that_is_not_the_users_is_refused(models: str, head: Any, words: str) -> None:
    """It would be ignored."""
    with pytest.raises(InputError, match=words):
        resolve(models, head)
