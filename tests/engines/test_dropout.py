"""Networks with dropout train together, with the masks that each client draws on its own in the plain loop."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from polyfed.engines import SequentialEngine, ThreadsEngine, VectorizedEngine
from polyfed.engines.stacked.dropout import Call, Masks, masked
from polyfed.engines.stacked.step import PhaseStep
from polyfed.message import State
from polyfed.models import SeededDropout
from polyfed.seeds import derive
from polyfed.server.federation import Federation
from tests import support


class Dropped(support.Wide):
    """Two dropout layers with different rates."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__(input_shape, classes)
        self.body.insert(3, nn.Dropout(0.4))
        self.last = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.last(self.body(x)))
        return logits


class Channels(nn.Module):
    """Whole channels are dropped, by one layer that is called twice."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(input_shape[0], 4, 3), nn.Conv2d(4, support.FEATURES, 3)
        self.drop = nn.Dropout2d(0.3)
        self.out = nn.Linear(support.FEATURES, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.first(x).relu())
        logits: Tensor = self.out(self.drop(self.second(x)).mean((2, 3)))
        return logits


class SamplesSecond(nn.Module):
    """Rows of an image as a sequence whose positions come first, and samples second."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.rows, self.drop = nn.Linear(input_shape[2], support.FEATURES), nn.Dropout(0.4)
        self.out = nn.Linear(support.FEATURES, classes)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.rows(x[:, 0].transpose(0, 1)).relu()
        logits: Tensor = self.out(self.drop(rows).mean(0))
        return logits


class Folded(SamplesSecond):
    """Rows of all images as one long batch, image after image."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.drop(self.rows(x[:, 0].flatten(0, 1)).relu())
        logits: Tensor = self.out(rows.unflatten(0, x.shape[:1] + x.shape[2:3]).mean(1))
        return logits


class Interleaved(SamplesSecond):
    """Rows of all images as one long batch, row after row: a row's place depends on the number of images."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.drop(self.rows(x[:, 0].transpose(0, 1).flatten(0, 1)).relu())
        logits: Tensor = self.out(rows.unflatten(0, (x.shape[2], -1)).mean(0))
        return logits


class OfWeights(support.Wide):
    """Dropout of a weight: its mask has no samples."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__(input_shape, classes)
        self.between, self.drop = nn.Parameter(torch.eye(support.FEATURES)), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.body(x) @ self.drop(self.between))
        return logits


def finished(tmp_path: Path, engine: Any, method: Any, **settings: Any) -> Federation:
    uneven = {"clients": 5, "partition": "dirichlet", "alpha": 0.5, "lr": 0.05, "training": {"epochs": 2}}
    run = support.federation(tmp_path, method, engine, **{**uneven, **settings})
    run.run()
    return run


def notes(run: Federation) -> list[str]:
    events = [event["note"] for event in run.folder.events() if event["event"] == "note"]
    return [note for note in events if "one after another" in note]


def assert_agree(one: Federation, other: Federation, **tolerance: float) -> None:
    rounds = [run.folder.rounds().drop(columns="seconds") for run in (one, other)]
    pd.testing.assert_frame_equal(*rounds, check_exact=not tolerance, **tolerance)  # type: ignore[call-overload]
    for client in range(one.config.clients):
        expected = one.engine.get_state(client)
        for name, tensor in other.engine.get_state(client).items():
            torch.testing.assert_close(tensor, expected[name], **tolerance or {"rtol": 0, "atol": 0})


def assert_engines_agree(tmp_path: Path, method: Any, network: Any, **settings: Any) -> Federation:
    """Returns the vectorized run; the last batches of an epoch are shorter, and clients have different numbers of them.

    A mask that met another sample would change the first digits of a loss.
    """
    engines = (SequentialEngine, partial(ThreadsEngine, workers=2), VectorizedEngine)
    plain, threads, stacked = (
        finished(tmp_path / str(number), engine, method, models=(network,), **settings)
        for number, engine in enumerate(engines)
    )
    assert_agree(plain, threads)
    assert_agree(plain, stacked, rtol=1e-3, atol=1e-4)
    return stacked


@pytest.mark.parametrize("network", [Dropped, Channels, SamplesSecond, Folded, OfWeights])
def test_networks_with_dropout_train_together(tmp_path: Path, network: type[nn.Module]) -> None:
    assert notes(assert_engines_agree(tmp_path, "fedproto", network)) == []


@pytest.mark.parametrize("method", ["pfedes", "fedclassavg", "fedapen", "fml", "fd", "fedl2g"])
def test_views_and_further_networks_take_masks_in_the_order_of_their_calls(tmp_path: Path, method: str) -> None:
    assert notes(assert_engines_agree(tmp_path, method, Dropped, training={"clip": 1.0})) == []


@pytest.mark.parametrize("network", [Dropped, OfWeights])
def test_a_second_phase_continues_where_a_client_s_first_one_stopped(tmp_path: Path, network: type[nn.Module]) -> None:
    """Also where others still had batches in the first phase, and a mask has no samples."""
    method = {"name": "fedavg", "finetune_epochs": 2}
    assert notes(assert_engines_agree(tmp_path, method, network)) == []


def test_dropout_beside_batch_norm(tmp_path: Path) -> None:
    stacked = assert_engines_agree(tmp_path, "fedproto", support.Normed, batch_size=6, partition="pathological")
    assert not [note for note in notes(stacked) if "dropout" in note]


def test_masks_are_checked_with_several_samples_and_without_rounding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batch norm of two samples has gradients that are mostly rounding, and TF32 looks like masks in another order."""
    seen = []
    loss = PhaseStep._client_loss

    def watched(step: PhaseStep, trained: State, frozen: State, batch: State) -> Any:
        seen.append((len(batch["y"]), step.bf16, {t.device.type for t in (trained | frozen | batch).values()}))
        return loss(step, trained, frozen, batch)

    check = PhaseStep.check_masks

    def checked(step: PhaseStep, inputs: State) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(PhaseStep, "_client_loss", watched)
            check(step, inputs)

    monkeypatch.setattr(PhaseStep, "check_masks", checked)
    finished(tmp_path, VectorizedEngine, "standalone", models=(support.Normed,), rounds=1, training={"bf16": True})
    assert seen == [(8, False, {"cpu"}), (9, False, {"cpu"})]


def test_bf16_does_not_hide_where_masks_belong(tmp_path: Path) -> None:
    settings = {"method": "standalone", "training": {"bf16": True}, "rounds": 1}
    plain, stacked, looped = (
        finished(tmp_path / f"{engine.name}-{network.__name__}", engine, models=(network,), **settings)
        for engine, network in (
            (SequentialEngine, Dropped), (VectorizedEngine, Dropped), (VectorizedEngine, Interleaved)
        )
    )  # fmt: skip
    losses = [run.folder.rounds().loss_mean.to_numpy() for run in (plain, stacked)]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert (len(notes(stacked)), len(notes(looped))) == (0, 1)


def test_masks_whose_place_depends_on_the_number_of_samples_stay_with_the_loop(tmp_path: Path) -> None:
    assert notes(assert_engines_agree(tmp_path, "standalone", Interleaved)) == [
        "clients with Interleaved train one after another: its dropout layers see the samples of a batch in an order "
        "that depends on their number"
    ]


def test_masks_in_a_cohort_are_drawn_at_each_client_s_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of 5, 3 and 2 samples in batches of 2, one epoch; the shorter batches draw nothing for their padding."""
    people = support.population("standalone", models=(Dropped,), clients=3, batch_size=2, seed=3)
    kept = dict(zip(people.data, (3, 5, 2), strict=True))
    people = replace(people, data={c: replace(own, train=own.train[: kept[c]]) for c, own in people.data.items()})
    original, seen = Masks.draw, list[dict[str, Tensor]]()

    def spy(self: Masks, generators: Any, *rest: Any, **named: Any) -> Any:
        drawn = original(self, generators, *rest, **named)
        if generators:
            seen.append({name: mask.clone() for name, mask in drawn.items()})
        return drawn

    monkeypatch.setattr(Masks, "draw", spy)
    VectorizedEngine(people).train(2, dict.fromkeys(range(3), support.Message()))
    assert len(seen) == 3
    for column, client in enumerate((1, 0, 2)):  # those with most samples first
        generator = torch.Generator().manual_seed(derive(3, "dropout", 2, client))
        for step, samples in enumerate({5: (2, 2, 1), 3: (2, 1), 2: (2,)}[kept[client]]):
            for name, width, rate in (("dropout.0", 16, 0.4), ("dropout.1", support.FEATURES, 0.2)):
                expected = torch.rand(samples, width, generator=generator) >= rate
                assert torch.equal(seen[step][name][column, :samples], expected)


def test_masks_of_a_step_stay_in_one_byte_per_value() -> None:
    masks = Masks([Call(0.5, (3,), 0), Call(0.5, (7, 1, 2), 1)], 4, torch.device("cpu"))
    generators = [torch.Generator().manual_seed(client) for client in range(4)]
    first = masks.draw(generators, [5] * 4, 5, stay=True)
    before = [mask.clone() for mask in first.values()]
    second = masks.draw(generators, [5, 5, 0, 2], 5, stay=True)
    assert [mask.data_ptr() for mask in first.values()] == [mask.data_ptr() for mask in second.values()]
    assert [mask.nbytes for mask in second.values()] == [4 * 5 * 3, 4 * 7 * 5 * 2]
    assert not any(torch.equal(one, two) for one, two in zip(before, second.values(), strict=True))
    assert all(bool(mask[2].all()) for mask in second.values())  # a client without samples
    assert bool(second["dropout.1"][3, :, 2:].all()) and not bool(second["dropout.1"][3, :, :2].all())


def test_a_cohort_whose_masks_do_not_fit_is_halved_and_draws_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory runs out in the second step, when masks of the first have already been drawn."""
    plain = finished(tmp_path / "plain", SequentialEngine, "standalone", models=(Dropped,))
    original, calls = Masks.draw, [0]

    def draw(self: Masks, generators: Any, *rest: Any, **named: Any) -> Any:
        calls[0] += len(generators) == 5
        if len(generators) == 5 and calls[0] > 1:
            raise torch.OutOfMemoryError("no room")
        return original(self, generators, *rest, **named)

    monkeypatch.setattr(Masks, "draw", draw)
    assert_agree(plain, finished(tmp_path, VectorizedEngine, "standalone", models=(Dropped,)), rtol=1e-3, atol=1e-4)
    assert calls[0] > 1


def test_masks_that_do_not_belong_to_the_calls_are_refused() -> None:
    layer, x = SeededDropout(0.5), torch.ones(2, 3)
    batch = {"dropout.0": torch.ones(2, 3, dtype=torch.bool)}
    with pytest.raises(RuntimeError, match="not called in the same way"), masked([layer], batch):
        pass
    with pytest.raises(RuntimeError, match="not called in the same way"), masked([layer], batch):
        layer(layer(x))
    with pytest.raises(RuntimeError, match="not called in the same way"), masked([layer], batch):
        layer(x[:1])
    assert layer.given is None
