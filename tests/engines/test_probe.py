"""A probe: which networks can be asked, and that asking changes nothing and draws nothing else."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyfed.engines import SequentialEngine, VectorizedEngine
from polyfed.engines.client.probing import ask, probe_sizes
from polyfed.errors import DivergedError, InputError
from polyfed.message import State
from polyfed.methods.base import Applied, Batch, ClientNetwork, Method, Probe, Trained
from polyfed.methods.parts.tools import cross_entropy
from tests import support


class Attentive(nn.Module):
    """Attention between the rows of an image, by a layer and by the function; both have fused kernels."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        self.out = nn.Linear(6, classes)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.layer(x[:, 0])
        mixed = nn.functional.scaled_dot_product_attention(rows, rows, rows)
        logits: Tensor = self.out(mixed.mean(1))
        return logits


class Recurrent(nn.Module):
    """An LSTM over the rows of an image, which PyTorch can't differentiate forwards."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 6, batch_first=True)
        self.out = nn.Linear(6, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.lstm(x[:, 0])[0][:, -1])
        return logits


def test_attention_is_differentiated_forwards_by_its_formula() -> None:
    """Against a central difference along the same direction."""
    clients = support.population("fedl2g", models=(Attentive,))
    net = clients.new_network(0).eval().double()
    x, y = clients.dataset.batch(torch.arange(0, 120, 20))
    seen: dict[str, Any] = {}

    def forwards(net: ClientNetwork, parameters: State, study: Batch, quiz: Batch) -> State:
        along = {name: torch.ones_like(tensor) for name, tensor in parameters.items()}
        features = Applied(net, lambda net, x: net.features(x))
        derivative = torch.func.jvp(lambda own: features.on(own)(study.x), (parameters,), (along,))[1]
        ends = [
            features.on({name: tensor + far for name, tensor in parameters.items()})(study.x) for far in (1e-6, -1e-6)
        ]
        seen.update(derivative=derivative, difference=(ends[0] - ends[1]) / 2e-6)
        return {}

    ask(Probe(forwards, (0.1, 1.0), (0.0, 0.1), 8), net, *[Batch(x.double(), y)] * 2)
    torch.testing.assert_close(seen["derivative"], seen["difference"], rtol=1e-4, atol=1e-6)
    assert float(seen["derivative"].abs().max()) > 0.01


def test_engines_agree_on_attention(tmp_path: Path) -> None:
    answers = []
    for engine in (SequentialEngine, VectorizedEngine):
        run = support.federation(tmp_path / engine.__name__, "fedl2g", engine, models=(Attentive,), rounds=1)
        answers.append(run.engine.train(1, {client: run.download(client) for client in range(4)}))
    for one, other in zip(*answers, strict=True):
        assert one.message.floats and one.flops == other.flops
        assert torch.equal(one.message.metadata["labels"], other.message.metadata["labels"])
        torch.testing.assert_close(
            one.message.tensors["gradients"], other.message.tensors["gradients"], rtol=1e-3, atol=1e-6
        )


def test_a_layer_without_a_rule_is_refused_before_round_one() -> None:
    with pytest.raises(InputError, match=r"Recurrent fails in the probe after training with fedl2g: .*forward AD"):
        support.population("fedl2g", models=(Recurrent,))


class Asking(Method):
    """Uploads nothing; keeps what a probe found, by round and client's classes."""

    name, title, paper, sends = "asking", "Asking", "none", "nothing"
    found: list[Any]

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.probe = Probe(self.difference, study=(0.5, 1.0), quiz=(0.0, 0.5), batch=1000)

    def difference(self, net: ClientNetwork, parameters: State, study: Batch, quiz: Batch) -> State:
        assert not net.training
        shares = [
            torch.ones_like(b.y, dtype=torch.float32) if b.mask is None else b.mask.float() for b in (study, quiz)
        ]
        losses = [
            (cross_entropy(net(b.x), b.y) * share).sum() / share.sum()
            for b, share in zip((study, quiz), shares, strict=True)
        ]
        return {"difference": losses[0] - losses[1], "samples": torch.stack([share.sum() for share in shares])}

    def upload(self, client: Trained) -> Any:
        assert client.probed is not None
        self.found.append({name: tensor.clone() for name, tensor in client.probed.items()})
        return super().upload(client)


def test_clients_with_different_numbers_of_samples_are_asked_about_their_own(tmp_path: Path) -> None:
    """Half of the samples in each batch; padded in a stack, but counted and averaged without padding."""
    kept = []
    for engine in (SequentialEngine, VectorizedEngine):
        found: list[Any] = []
        method = type("Asking", (Asking,), {"found": found})
        run = support.federation(
            tmp_path / engine.__name__,
            method,
            engine,
            models=(support.Wide,),
            partition="dirichlet",
            alpha=0.5,
            rounds=1,
        )
        run.run()
        people = run.engine.population
        assert len({len(own.train) for own in people.data.values()}) > 1
        sizes = {tuple(sample.int().tolist()) for sample in (each["samples"] for each in found)}
        assert sizes == {probe_sizes(people, client) for client in range(4)}
        kept.append(sorted(float(each["difference"]) for each in found))
    assert kept[1] == pytest.approx(kept[0], abs=1e-4)


@pytest.mark.parametrize("engine", [SequentialEngine, VectorizedEngine])
def test_asking_changes_no_state_and_no_other_draw(tmp_path: Path, engine: Any) -> None:
    """A method that trains alone and asks ends with Standalone's states, batch norm's too."""
    models = (support.Normed, support.Wide)
    asking = type("Asking", (Asking,), {"found": []})
    runs = [
        support.federation(tmp_path / str(number), method, engine, models=models)
        for number, method in enumerate((asking, "standalone"))
    ]
    for run in runs:
        run.run()
    for client in range(4):
        for name, tensor in runs[1].engine.get_state(client).items():
            assert torch.equal(runs[0].engine.get_state(client)[name], tensor), name


@pytest.mark.parametrize("engine", [SequentialEngine, VectorizedEngine])
def test_what_is_not_finite_stops_the_run(tmp_path: Path, engine: Any) -> None:
    class Broken(Asking):
        found: list[Any] = []

        def difference(self, net: ClientNetwork, parameters: State, study: Batch, quiz: Batch) -> State:
            return {"difference": cross_entropy(net(study.x), study.y).sum() / 0.0}

    with pytest.raises(DivergedError, match="client 0 .*round 1"):
        support.federation(tmp_path, Broken, engine, rounds=1).run()


def test_no_warning_of_pytorchs_reaches_the_user(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        support.federation(tmp_path, "fedl2g", rounds=1).run()
