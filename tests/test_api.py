"""polyfed from Python: own data, own networks, results as frames; and code that runs no one else's."""

import ast
import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import polyfed
from polyfed.records import disk
from tests import support

PACKAGE = Path(polyfed.__file__).parent


@pytest.fixture(scope="module")
def arrays() -> polyfed.Dataset:
    """Images whose brightness tells the class."""
    generator = np.random.default_rng(0)
    labels = np.arange(120) % 3
    images = (generator.integers(0, 40, (120, 8, 8)) + 90 * labels[:, None, None]).astype(np.uint8)
    return polyfed.from_arrays(images, labels, name="brightness")


@pytest.mark.parametrize("method", ["standalone", "fedproto"])
def test_arrays_and_own_networks_give_frames_and_models(arrays: polyfed.Dataset, method: str) -> None:
    result = polyfed.run(
        method, data=arrays, models=[support.Wide, support.Normed], clients=4, rounds=3, lr=0.05, batch_size=8,
        split="5:2:3", device="cpu",
    )  # fmt: skip
    assert result.rounds["round"].tolist() == [1, 2, 3]
    assert result.clients.architecture.tolist() == ["Wide", "Normed"] * 2
    assert result.summary["accuracy_final"] == pytest.approx(result.clients.accuracy_final.mean())
    assert len(result.models) == 4
    for client, row in result.clients.iterrows():
        own = result.population.data[int(str(client))]
        x, y = arrays.batch(own.test)
        right = result.predict(int(str(client)), x).classes == y
        assert (len(own.test), float(right.float().mean())) == pytest.approx((row.test_samples, row.accuracy_final))
        if method == "standalone":
            assert torch.equal(result.model(int(str(client)))(x).argmax(1) == y, right)


def test_a_client_that_does_not_exist_is_named(arrays: polyfed.Dataset) -> None:
    result = polyfed.run("standalone", data=arrays, models=support.Wide, clients=2, rounds=1, device="cpu")
    with pytest.raises(polyfed.InputError, match="no client 2; the run has 2 clients"):
        result.model(2)
    assert not result.model(0).training


@pytest.mark.parametrize("partition", ["shares", "iid"])
def test_a_single_class_is_nothing_to_learn(arrays: polyfed.Dataset, partition: str) -> None:
    data = (arrays.images, arrays.labels * 0)
    with pytest.raises(polyfed.InputError, match="'arrays' has a single class: a classifier needs 2 or more"):
        polyfed.run("standalone", data=data, models=support.Wide, clients=2, partition=partition, classes_per_client=1)


def test_a_temporary_folder_lives_as_long_as_the_result(arrays: polyfed.Dataset) -> None:
    result = polyfed.run("standalone", data=arrays, models=support.Wide, clients=2, rounds=1, device="cpu")
    path = result.folder.path
    assert path.exists()
    del result
    assert not path.exists()


def test_the_same_seed_gives_the_same_numbers_and_another_seed_others(arrays: polyfed.Dataset) -> None:
    def losses(seed: int) -> list[float]:
        result = polyfed.run(
            "standalone", data=arrays, models=support.Wide, clients=3, rounds=2, seed=seed, device="cpu"
        )
        return result.rounds.loss_mean.tolist()

    assert losses(0) == losses(0) != losses(1)


def test_a_run_leaves_the_global_generators_alone(arrays: polyfed.Dataset) -> None:
    def drawn(go: bool) -> tuple[float, float]:
        torch.manual_seed(1)
        np.random.seed(1)
        if go:
            polyfed.run("fedproto", data=arrays, models=[support.Wide, support.Normed], clients=2, rounds=1).model(1)
        return float(torch.rand(1)), float(np.random.rand())

    assert drawn(True) == drawn(False)


def test_instances_start_from_their_own_weights(arrays: polyfed.Dataset) -> None:
    """A ready network is copied, so that the caller's stays as it is."""
    network = support.Wide(arrays.input_shape, arrays.classes)
    before = network.out.weight.detach().clone()
    result = polyfed.run("standalone", data=arrays, models=network, clients=2, rounds=1, lr=1e-9, device="cpu")
    assert torch.equal(network.out.weight, before)
    assert torch.allclose(result.model(1).head.weight, before, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rounds": 0}, "rounds is 0"),
        ({"clients": 121, "partition": "iid"}, "121 clients cannot share the 120 samples"),
        ({"classes_per_client": 4}, "classes_per_client is 4, but 'brightness' has samples of 3 classes"),
        ({"models": [support.Wide, "cnn1"]}, "cnn1 needs images of at least 16x16 pixels"),
        ({"models": 3}, "does not describe networks"),
        ({"method": {"name": "fedproto", "wight": 1}}, "did you mean 'weight'"),
    ],
)
def test_bad_input_raises_one_sentence(arrays: polyfed.Dataset, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(polyfed.InputError, match=words):
        polyfed.run(**{"method": "standalone", "data": arrays, "models": support.Wide, **settings})


def test_clients_with_a_single_sample_are_no_problem(arrays: polyfed.Dataset) -> None:
    result = polyfed.run(
        "standalone", data=arrays, models=support.Wide, clients=100, partition="iid", rounds=1, device="cpu"
    )
    assert result.rounds.accuracy_mean.notna().all()  # the mean over those who have a sample to test on
    assert result.clients.train_samples.tolist() == [1] * 100


def test_a_run_in_which_nobody_could_be_tested_is_refused(arrays: polyfed.Dataset) -> None:
    with pytest.raises(polyfed.InputError, match="no client would have a test sample.*use fewer clients"):
        polyfed.run("standalone", data=arrays, models=support.Wide, clients=120, partition="iid")


def test_a_network_is_built_once_per_architecture_before_round_one(
    arrays: polyfed.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A federation of many clients must not cost a network each before it starts."""
    built = []

    def factory(input_shape: tuple[int, ...], classes: int) -> support.Wide:
        built.append(1)
        return support.Wide(input_shape, classes)

    support.population("standalone", models=(factory,), data=arrays, clients=60, partition="iid")
    assert len(built) < 6


def test_a_disk_that_is_full_for_good_stops_the_run_with_a_sentence(
    arrays: polyfed.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own: dict[str, Any] = {"data": arrays, "models": support.Wide}
    settings = {"method": "standalone", "clients": 2, "rounds": 3, "checkpoint_every": 1, "device": "cpu"}
    whole = polyfed.run(**settings, **own)

    append = disk.append

    def full(path: Path, content: bytes, **options: Any) -> None:
        if content.startswith(b"2,"):
            append(path, content[:5])
            raise OSError(errno.ENOSPC, "No space left on device")
        append(path, content, **options)

    with monkeypatch.context() as patch:
        patch.setattr(disk, "append", full)
        with pytest.raises(polyfed.RunError, match="No space left on device; .*`polyfed resume .*run`"):
            polyfed.run(**settings, **own, out=tmp_path / "run")
    resumed = polyfed.resume(tmp_path / "run", **own)
    assert resumed.rounds.drop(columns="seconds").equals(whole.rounds.drop(columns="seconds"))


# Safety --------------------------------------------------------------------------------------------------------

FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "torch.load", "torch.save", "yaml.unsafe_load"}


def dangers(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (f"imports {name}" for name in names if name.split(".")[0] in FORBIDDEN_MODULES)
        if isinstance(node, ast.Call):
            if ast.unparse(node.func) in FORBIDDEN_CALLS and not reads_tensors_only(node):
                yield f"calls {ast.unparse(node.func)}"
            yield from ("allows pickle" for k in node.keywords if k.arg == "allow_pickle" and not is_false(k.value))


def reads_tensors_only(call: ast.Call) -> bool:
    """Whether this is torch.load as it reads a state dictionary: tensors, and nothing that runs code."""
    safe = [k for k in call.keywords if k.arg == "weights_only"]
    literal = len(safe) == 1 and isinstance(safe[0].value, ast.Constant) and safe[0].value.value is True
    return ast.unparse(call.func) == "torch.load" and literal


def is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_package_runs_nobody_s_bytes(path: Path) -> None:
    assert list(dangers(ast.parse(path.read_text()))) == []


def test_the_scan_finds_what_it_looks_for() -> None:
    text = "import pickle\nfrom marshal import x\neval('1')\ntorch.load(f)\nnp.load(f, allow_pickle=True)\n"
    assert len(list(dangers(ast.parse(text)))) == 5
    assert not list(dangers(ast.parse("np.load(f, allow_pickle=False)\nmodel.eval()\nre.compile('a')\n")))
    assert not list(dangers(ast.parse("torch.load(f, weights_only=True)")))
    for loaded in (
        "torch.load(f, weights_only=False)",
        "torch.load(f, weights_only=flag)",
        "eval(f, weights_only=True)",
    ):
        assert len(list(dangers(ast.parse(loaded)))) == 1


class TwoEnds(nn.Module):
    """Its last linear layer is not where its owner wants it split."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(36, 5), nn.ReLU())
        self.tail = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, classes))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.tail(self.body(x))
        return logits


@pytest.mark.parametrize(("head", "features"), [(None, 7), ("tail", 5)])
def test_the_user_may_name_the_head(head: str | None, features: int) -> None:
    result = polyfed.run(
        "standalone", data=support.tiny_dataset(), models=[TwoEnds], clients=2, rounds=1, head=head, device="cpu"
    )
    assert result.model(0).feature_size == features
