"""Users' networks that can't be trained: one sentence before round one, and no run folder."""

from __future__ import annotations

import warnings
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polyfed
from polyfed import InputError, cli
from polyfed.engines import SequentialEngine, ThreadsEngine, VectorizedEngine
from polyfed.errors import ClientError
from polyfed.message import Message
from polyfed.methods.base import Method
from polyfed.methods.lg_fedavg import LGFedAvg
from polyfed.models import resolve
from tests import support

Outputs = namedtuple("Outputs", ["logits", "auxiliary"])


class Auxiliary(support.Wide):
    """In training it gives more than its logits, as torchvision's GoogLeNet and Inception do."""

    def forward(self, x: Tensor) -> Any:
        logits = self.out(self.body(x))
        return Outputs(logits, logits) if self.training else logits


class Buggy(support.Wide):
    """Its forward has a mistake."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.bodi(x))  # type: ignore[operator]


class BuggyInTraining(support.Wide):
    """Its forward has a mistake where only training comes."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x + missing  # type: ignore[name-defined]  # noqa: F821
        return super().forward(x)


class Unused(support.Wide):
    """It computes something by a linear layer, last of all, and does not use it."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__(input_shape, classes)
        self.auxiliary = nn.Linear(support.FEATURES, classes)

    def forward(self, x: Tensor) -> Tensor:
        features = self.body(x)
        logits: Tensor = self.out(features)
        self.auxiliary(features)
        return logits


class TwoLayers(nn.Module):
    """A head of two layers, called `classifier`."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(36, support.FEATURES))
        self.classifier = nn.Sequential(nn.Linear(support.FEATURES, 5), nn.ReLU(), nn.Linear(5, classes))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.body(x))
        return logits


def line_of(text: str) -> int:
    return next(n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if text in line)


HERE = "tests.test_rehearsal"
TINY = ("--clients", "2", "--rounds", "1", "--device", "cpu", "--out", "run")


def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str
) -> tuple[int, str]:
    """The exit status and what is said on standard error."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.argv", ["polyfed", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0), capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--models", f"{HERE}:Auxiliary"), "gives a value of type Outputs in training mode, .*aux_logits=False"),
        (("--models", f"{HERE}:Buggy"), "'Buggy' object has no attribute 'bodi' .*test_rehearsal.py, line {bodi}"),
        (
            ("--models", f"{HERE}:BuggyInTraining"),
            r"fails in training \(phase 'model'\) with standalone: name 'missing'",
        ),
        (("--models", f"{HERE}:Unused"), "whose output it does not use: its logits come from 'out', so .*head=out"),
        (("--features", "1000000000"), "features is 1000000000, but heads with that many features .* GB"),
        (("--clients", "1000000000"), "1000000000 clients cannot share the 1797 samples of 'digits'"),
        (("--models", f"{HERE}:TwoLayers", "--set", "head=a,b"), "head names 2 layers, but there are 1 networks"),
        (("--models", f"{HERE}:TwoLayers", "--set", "head={TwoLayer: a}"), "head 'TwoLayer': did you mean"),
    ],
)
def test_what_can_not_be_trained_is_one_sentence_without_a_run_folder(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    words: str,
) -> None:
    given = tuple(a for a in TINY if "--clients" not in arguments or a not in ("--clients", "2"))
    status, said = command(monkeypatch, capsys, tmp_path, "run", "standalone", *given, *arguments)
    assert (status, said.count("\n")) == (2, 1), said
    assert words_match(words.replace("{bodi}", str(line_of("self.bodi(x)"))), said)
    assert not (tmp_path / "run").exists()


def words_match(words: str, said: str) -> bool:
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(said)
    return True


def test_debug_shows_the_whole_traceback_wherever_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("run", "standalone", "--models", f"{HERE}:Buggy", *TINY)
    for given in (("--debug", *arguments), (*arguments, "--debug")):
        status, said = command(monkeypatch, capsys, tmp_path, *given)
        assert status == 2
        assert "Traceback" in said
        assert "return self.out(self.bodi(x))" in said
        assert said.splitlines()[-1].startswith("polyfed: ")


def test_python_keeps_the_original_error() -> None:
    with pytest.raises(InputError) as caught:
        support.population("standalone", models=(BuggyInTraining,))
    assert isinstance(caught.value.__cause__, NameError)


class BuggyLater(support.Wide):
    """Its forward fails when a buffer says so."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__(input_shape, classes)
        self.register_buffer("broken", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if bool(self.broken > 0):
            raise ValueError("I am broken")
        return super().forward(x)


def test_an_error_of_the_network_in_the_middle_of_a_run_is_one_sentence() -> None:
    clients = support.population("standalone", models=(BuggyLater,))
    engine = SequentialEngine(clients)
    engine.train(1, {0: Message()})
    engine.get_state(0)["model.extractor.broken"].fill_(1)
    who, why = r"client 0 \(BuggyLater\) failed in", r"I am broken \(.*test_rehearsal.py, line \d+\)"
    with pytest.raises(ClientError, match=f"{who} the evaluation of round 2: {why}"):
        engine.evaluate([0], 2)
    when = r"round 2, phase 'model' on a batch of shape \(8, 1, 6, 6\)"
    with pytest.raises(ClientError, match=f"{who} {when}: {why}") as caught:
        engine.train(2, {0: Message()})
    assert isinstance(caught.value.__cause__, ValueError)


class NeedsOdd(Method):
    """A loss that fails in the second round, in no code of a network."""

    name = "needs-odd"
    title = paper = sends = "a test"
    calls = 0

    def receive(self, state: Any, message: Message, client: Any) -> Any:
        NeedsOdd.calls = client.round
        return {}

    def loss(self, net: Any, batch: Any) -> Tensor:
        if NeedsOdd.calls == 2:
            raise KeyError("no such thing")
        return super().loss(net, batch)


@pytest.mark.parametrize("engine", [SequentialEngine, ThreadsEngine, VectorizedEngine])
def test_an_error_in_a_loss_names_clients_round_and_phase_on_every_engine(tmp_path: Path, engine: Any) -> None:
    NeedsOdd.calls = 0
    run = support.federation(tmp_path, NeedsOdd, engine=engine, rounds=2, models=(support.Wide,))
    with pytest.raises(ClientError, match=r"clients? .*\(Wide\) failed in round 2.*no such thing.*test_rehearsal.py"):
        run.run()
    run.engine.close()


def scripted(network: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is on its way out
        return torch.jit.trace(network, torch.zeros(2, 1, 6, 6))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (nn.Module.double, "Wide has parameters of type float64, .* convert it with network.float"),
        (nn.Module.half, "Wide has parameters of type float16"),
        (scripted, "is compiled by TorchScript"),
    ],
)
def test_networks_of_other_kinds_are_refused(change: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        support.population("standalone", models=(change(support.Wide((1, 6, 6), 4)),))


def test_heads_are_named_for_each_network() -> None:
    """Without a name the last linear layer is the head: that of `TwoLayers` has 5 features."""
    models = [support.Wide, TwoLayers, "cnn1"]
    for head in ("out,classifier", ["out", "classifier"], {"TwoLayers": "classifier"}, ",classifier"):
        wide, two, _ = resolve(models, head)
        assert wide.build((1, 6, 6), 4).feature_size == support.FEATURES
        assert two.build((1, 6, 6), 4).feature_size == support.FEATURES
    assert resolve(TwoLayers)[0].build((1, 6, 6), 4).feature_size == 5
    assert resolve([TwoLayers, TwoLayers], "classifier")[1].build((1, 6, 6), 4).feature_size == support.FEATURES


def test_heads_from_python_survive_the_record(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"data": support.tiny_dataset(), "models": [support.Wide, TwoLayers], "rounds": 1}
    head = {"Wide": "out", "TwoLayers": "classifier"}
    result = polyfed.run("standalone", head=head, clients=2, device="cpu", out=tmp_path / "run", **settings)
    assert isinstance(result.model(1).head, nn.Sequential)
    assert result.folder.config.head == head


def test_advice_on_heads_can_be_followed() -> None:
    """With equal features, asking for a number of features changes nothing."""
    models = resolve([support.Wide, TwoLayers], "out,classifier")
    with pytest.raises(InputError, match="choose networks with the same kind of head") as caught:
        support.population("lg-fedavg", models=models)
    assert "--features" not in str(caught.value)


class BiasOnly(LGFedAvg):
    """Own methods are given as classes."""

    name = "bias-only-test"
    title, paper, sends = "Bias only", "a test", "the bias of the head"

    def upload(self, client: Any) -> Message:
        message = super().upload(client)
        return Message({n: t for n, t in message.tensors.items() if n.endswith("bias")}, message.metadata)

    def check(self, message: Message) -> None: ...


class Nameless(LGFedAvg):
    """It forgot to say its own name."""


def test_a_method_class_can_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyfed.methods.METHODS", dict(polyfed.METHODS))
    settings: dict[str, Any] = {"data": support.tiny_dataset(), "models": support.Wide, "rounds": 1, "clients": 2}
    for method in (BiasOnly, {"name": BiasOnly}):
        result = polyfed.run(method, device="cpu", **settings)
        assert result.rounds.upload_floats.tolist() == [2 * 4]
        assert result.summary["method"] == "bias-only-test"
    with pytest.raises(InputError, match="Nameless is called 'lg-fedavg', like one of polyfed's own"):
        polyfed.run(Nameless, device="cpu", **settings)
    with pytest.raises(InputError, match="use one run per method"):
        polyfed.run(["fedavg", "fedproto"], device="cpu", **settings)  # type: ignore[arg-type]
