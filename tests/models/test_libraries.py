"""Networks of other libraries by name, with weights from local files only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import polyfed
from polyfed.addresses import names_code
from polyfed.engines import SequentialEngine, ThreadsEngine, VectorizedEngine
from polyfed.engines.client.workbench import state_of
from polyfed.errors import InputError
from polyfed.models import SplitNetwork, resolve, smallest
from polyfed.models.encoders import Adapter, adapt
from polyfed.models.libraries import from_library
from polyfed.resuming import check_trusted
from polyfed.shapes import TokenShape
from tests import support
from tests.export.runs import finished
from tests.kinds import texts

IMAGES = (3, 32, 32)


def built(name: str, shape: tuple[int, ...] = IMAGES, classes: int = 5, **options: Any) -> SplitNetwork:
    torch.manual_seed(0)
    return resolve(name)[0].build(shape, classes, **options)


@pytest.mark.parametrize(
    ("name", "features"),
    [
        ("torchvision:mobilenet_v3_small", 1024),
        ("torchvision:shufflenet_v2_x0_5", 1024),
        ("torchvision:squeezenet1_1", 512),
        ("torchvision:googlenet", 1024),
    ],
)
def test_networks_of_torchvision(name: str, features: int) -> None:
    network = built(name)
    assert network.feature_size == features and isinstance(network.head, nn.Linear)
    assert network(torch.zeros(2, *IMAGES)).shape == (2, 5)
    assert built(name, features=64).feature_size == 64


@pytest.mark.parametrize(("name", "shape"), [("timm:resnet10t", (1, 32, 32)), ("timm:vit_tiny_patch16_224", IMAGES)])
def test_networks_of_timm_accept_other_channels_and_sizes(name: str, shape: tuple[int, ...]) -> None:
    pytest.importorskip("timm")
    network = built(name, shape)
    assert network(torch.zeros(2, *shape)).shape == (2, 5)
    assert isinstance(network.head, nn.Linear)


@pytest.mark.parametrize("kind", ["safetensors", "pth"])
@pytest.mark.parametrize("classes", [5, 9])
def test_weights_come_from_a_local_file(tmp_path: Path, kind: str, classes: int) -> None:
    """With 5 classes the last layer is theirs too; with 9 it is new."""
    from torchvision.models import shufflenet_v2_x0_5

    torch.manual_seed(7)
    reference = shufflenet_v2_x0_5(num_classes=5)
    path = tmp_path / f"weights.{kind}"
    if kind == "pth":
        torch.save(reference.state_dict(), path)
    else:
        save_file(reference.state_dict(), path)
    name = f"torchvision:shufflenet_v2_x0_5?weights={path}"
    network = built(name, classes=classes)
    assert torch.equal(network.extractor.conv1[0].weight, reference.conv1[0].weight)  # type: ignore[union-attr,index]
    assert torch.equal(network.head.weight, reference.fc.weight) == (classes == 5)  # type: ignore[arg-type]
    architecture = resolve(name)[0]
    assert architecture.name == "torchvision:shufflenet_v2_x0_5"
    assert smallest([architecture], IMAGES, classes) is architecture


def bad_files(folder: Path) -> dict[str, str]:
    from torchvision.models import resnet18

    state = resnet18(num_classes=5).state_dict()
    torch.save({"state_dict": state}, folder / "nested.pth")
    torch.save(nn.Linear(2, 2), folder / "code.pth")
    (folder / "text.safetensors").write_text("no weights")
    save_file({**state, "fc.bias": torch.full((5,), torch.nan)}, folder / "nan.safetensors")
    save_file({k: v for k, v in state.items() if k != "conv1.weight"}, folder / "short.safetensors")
    save_file({**state, "conv1.weight": torch.zeros(64, 1, 7, 7)}, folder / "grey.safetensors")
    save_file({**state, "more": torch.zeros(1)}, folder / "more.safetensors")
    return {
        "missing.pth": "there is no file",
        "nested.pth": "something other than named tensors",
        "code.pth": "can't be read as weights|holds more than named tensors",
        "text.safetensors": "can't be read as weights",
        "nan.safetensors": "values in 'fc.bias' that are not finite",
        "short.safetensors": "it lacks 'conv1.weight'",
        "grey.safetensors": r"'conv1.weight' has the shape \(64, 1, 7, 7\)",
        "more.safetensors": "it has 'more', which the network has not",
    }


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    for file, words in bad_files(tmp_path).items():
        with pytest.raises(InputError, match=words):
            built(f"torchvision:resnet18?weights={tmp_path / file}")


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("torchvision:resnet19", IMAGES, "unknown network of torchvision 'resnet19': did you mean"),
        ("torchvision:", IMAGES, "names no network: write torchvision:NAME"),
        ("torchvision:resnet18?weigths=a", IMAGES, "did you mean 'weights'"),
        ("torchvision:resnet18?weights=", IMAGES, "gives no value for weights"),
        ("torchvision:resnet18", (1, 32, 32), "needs images with 3 channels, but they have 1"),
        ("torchvision:resnet18", (30,), "--models tabular4"),
        ("torchvision:vit_b_16", (3, 33, 33), "can't be built for images of shape"),
        ("hf:somewhere?rank=0", (30,), "must be a whole number from 1, not '0'"),
        ("hf:no/such-folder", (30,), "can't be read from local files"),
    ],
)
def test_names_and_images_that_do_not_fit_are_refused(name: str, shape: tuple[int, ...], words: str) -> None:
    if name.startswith("hf:"):
        pytest.importorskip("transformers")
    with pytest.raises(InputError, match=words):
        built(name, shape)


def test_a_head_that_would_not_be_used_is_refused() -> None:
    with pytest.raises(InputError, match="head is 'fc', but it is for networks of your own"):
        resolve("torchvision:resnet18", head="fc")


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyfed.models.libraries.find_spec", lambda package: None)
    with pytest.raises(InputError, match=r"need the package timm, .* pip install 'polyfed\[timm\]'"):
        from_library("timm:resnet18")


def test_names_of_libraries_are_no_code_but_torch_files_need_trust(tmp_path: Path) -> None:
    assert not names_code("torchvision:resnet18, timm:resnet18")
    assert names_code("torchvision.models:resnet18")
    for weights, refused in (("", False), ("?weights=a.safetensors", False), ("?weights=a.pth", True)):
        config = polyfed.experiment(method="fedavg", models=f"cnn1, torchvision:resnet18{weights}")
        check_trusted(config, tmp_path, trust=True)
        if refused:
            with pytest.raises(InputError, match="say so with --trust"):
                check_trusted(config, tmp_path, trust=False)
        else:
            check_trusted(config, tmp_path, trust=False)


def test_a_trained_network_is_rebuilt_without_its_file(tmp_path: Path) -> None:
    from torchvision.models import shufflenet_v2_x0_5

    path = tmp_path / "weights.safetensors"
    save_file(shufflenet_v2_x0_5(num_classes=3).state_dict(), path)
    data = support.tiny_dataset(channels=3, side=32, per_class=6)
    result = finished(tmp_path / "run", "standalone", f"torchvision:shufflenet_v2_x0_5?weights={path}", data, rounds=1)
    x = data.images[:3]
    expected = result.predict(0, x).probabilities
    path.unlink()
    model = polyfed.load_client(tmp_path / "run", 0)
    assert torch.allclose(model.predict(x).probabilities, expected, atol=1e-6)
    assert str(path) not in (tmp_path / "run" / "models" / "card.json").read_text()


# Encoders -------------------------------------------------------------------------------------------------------


def test_an_adapter_adds_a_product_of_two_thin_layers() -> None:
    """With base 0, down (1, 1) and up (2, 3): the input (4, 5) becomes 9 and then (18, 27)."""
    adapter = Adapter(nn.Linear(2, 2, bias=False), rank=1)
    with torch.no_grad():
        adapter.base.weight.zero_()
        adapter.down.weight.fill_(1)
        adapter.up.weight.copy_(torch.tensor([[2.0], [3.0]]))
    assert adapter(torch.tensor([[4.0, 5.0]])).tolist() == [[18.0, 27.0]]
    assert [name for name, p in adapter.named_parameters() if p.requires_grad] == ["down.weight", "up.weight"]


def test_queries_and_values_are_adapted_or_else_all_layers() -> None:
    named = nn.ModuleDict({"query": nn.Linear(2, 2), "key": nn.Linear(2, 2), "value": nn.Linear(2, 2)})
    assert adapt(named, 1) == 2 and isinstance(named["key"], nn.Linear)
    assert adapt(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 1) == 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT as `save_pretrained` writes it."""
    transformers = pytest.importorskip("transformers")
    place = tmp_path_factory.mktemp("bert")
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=12, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(1)
    transformers.BertModel(config).save_pretrained(place)
    return place


def test_an_encoder_is_frozen_but_for_its_adapters_and_head(folder: Path) -> None:
    network = built(f"hf:{folder}?rank=2", TokenShape((9,), 20, 0))
    assert network.feature_size == 16
    trained = {name.rpartition("attention.self.")[2] for name, p in network.named_parameters() if p.requires_grad}
    assert trained == {
        "query.down.weight", "query.up.weight", "value.down.weight", "value.up.weight", "head.weight", "head.bias",
    }  # fmt: skip
    ids = torch.tensor([[3, 5, 7, 0, 0, 0, 0, 0, 0]])
    torch.testing.assert_close(network.features(ids), network.features(ids[:, :3]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (TokenShape((9,), 21, 0), "knows 20 token ids, but the data have 21"),
        (TokenShape((13,), 20, 0), "reads at most 12 tokens, but samples have 13"),
        (TokenShape((9,), 20, 3), "fills short samples with the id 0, but the data with 3"),
        ((3, 8, 8), r"needs token ids, but samples are numbers of shape \(3, 8, 8\)"),
    ],
)
def test_samples_that_an_encoder_can_not_read_are_refused(folder: Path, shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(InputError, match=words):
        built(f"hf:{folder}", shape)


def test_all_engines_agree_on_an_encoder_whose_body_never_changes(tmp_path: Path, folder: Path) -> None:
    runs = []
    for engine in (SequentialEngine, ThreadsEngine, VectorizedEngine):
        run = support.federation(
            tmp_path / engine.__name__, "fedavg", engine, models=[f"hf:{folder}"], dataset=texts(), clients=3
        )
        run.run()
        run.engine.close()
        runs.append(run)
    first = state_of(runs[0].engine.population.new_network(0))
    reference = runs[0].engine.get_state(0)
    changed = {name for name, tensor in reference.items() if not torch.equal(tensor, first[name])}
    assert changed <= {name for name in reference if ".up." in name or ".down." in name or ".head." in name}
    assert {"model.head.weight"} < changed and any(".up." in name for name in changed)
    for run in runs[1:]:
        for name, tensor in run.engine.get_state(0).items():
            torch.testing.assert_close(tensor, reference[name], rtol=1e-3, atol=1e-5)
    message = runs[0].server.state
    assert message and all("body.embeddings" not in name for name in message)


def test_an_encoder_leaves_its_run(tmp_path: Path, folder: Path) -> None:
    data = texts()
    result = finished(tmp_path / "run", "standalone", f"hf:{folder}?rank=2", data, rounds=1)
    model = polyfed.load_client(tmp_path / "run", 1)
    expected = result.predict(1, data.images[:4]).probabilities
    assert torch.allclose(model.predict(data.images[:4]).probabilities, expected, atol=1e-6)
