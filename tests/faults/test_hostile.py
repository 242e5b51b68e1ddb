"""Whole runs with one hostile client of five: it is refused and the run continues, or named if training breaks."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from polyfed.engines import SequentialEngine
from polyfed.errors import DivergedError
from polyfed.message import Message
from polyfed.methods import METHODS
from polyfed.methods.base import Reply
from polyfed.server.federation import Federation
from tests import support


class Hostile(SequentialEngine):
    """Client 3 multiplies what it sends in some rounds, or claims to have more samples than there are."""

    factor: float = 1.0
    samples: int | None = None
    when: Collection[int] = range(1, 100)

    def train(
        self,
        round: int,
        downloads: Mapping[int, Message],
        done: Callable[[int], None] = lambda client: None,
        *,
        score: bool = False,
    ) -> list[Reply]:
        replies = super().train(round, downloads, done)
        if round in self.when:
            replies[3] = replace(replies[3], message=self._spoil(replies[3].message))
        return replies

    def _spoil(self, message: Message) -> Message:
        counts = {} if self.samples is None else {"samples": torch.tensor([self.samples])}
        tensors = {name: tensor * self.factor for name, tensor in message.tensors.items()}
        return Message(tensors, {**message.metadata, **counts})


def poisoned(tmp_path: Path, method: str, factor: float, when: Collection[int] = range(1, 100), **more: Any) -> Any:
    if method == "fedavg":
        more["models"] = (support.Wide,)
    run = support.federation(tmp_path, method, engine=Hostile, clients=5, **more)
    run.engine.factor, run.engine.when = factor, when  # type: ignore[attr-defined]
    return run


def refusals(run: Federation) -> list[tuple[int, int]]:
    events = run.folder.events()
    return [(e["round"], e["client"]) for e in events if "continues without client" in e.get("note", "")]


@pytest.mark.parametrize("method", [name for name in METHODS if name != "standalone"])
def test_one_client_can_not_stop_a_run_with_huge_values(tmp_path: Path, method: str) -> None:
    run = poisoned(tmp_path, method, 1e10)
    run.run()
    assert refusals(run) == [(1, 3), (2, 3)]
    assert run.folder.rounds().replies.tolist() == [4, 4]
    assert (run.folder.rounds().upload_bytes > 0).all()


@pytest.mark.parametrize("method", [name for name in METHODS if name != "standalone"])
def test_no_honest_reply_is_refused_or_even_unusual(tmp_path: Path, method: str) -> None:
    run = poisoned(tmp_path, method, 1.0)
    run.run()
    assert refusals(run) == []
    assert run.progress.sizes.unusual == []


def test_a_client_can_not_claim_more_samples_than_any_client_has(tmp_path: Path) -> None:
    run = poisoned(tmp_path, "lg-fedavg", 1.0)
    run.engine.samples = 10**12
    run.run()
    assert refusals(run) == [(1, 3), (2, 3)]
    largest = max(len(data.train) for data in run.engine.population.data.values())
    assert run.door.most_samples == largest
    allowed = poisoned(tmp_path / "allowed", "lg-fedavg", 1.0, count_bound=10**12)
    allowed.engine.samples = 10**12
    allowed.run()
    assert refusals(allowed) == []


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint64, torch.complex64, torch.float8_e4m3fn])
def test_a_refused_reply_of_an_unusual_type_costs_its_bytes(tmp_path: Path, dtype: torch.dtype) -> None:
    run = poisoned(tmp_path, "fedproto", 1.0, rounds=1)
    run.engine._spoil = lambda message: Message({"prototypes": torch.zeros(3).to(dtype)}, message.metadata)
    run.round(1)
    assert refusals(run) == [(1, 3)]
    spoiled = Message({"prototypes": torch.zeros(3).to(dtype)}, {"labels": torch.arange(2)})
    sound = Message({"prototypes": torch.zeros(2, support.FEATURES)}, {"labels": torch.arange(2)})
    (event,) = [event for event in run.folder.events() if event["event"] == "round"]
    assert event["upload_bytes"] == 4 * len(sound.to_bytes()) + len(spoiled.to_bytes())


def test_the_sender_of_a_poisonous_reply_is_named_not_its_victim(tmp_path: Path) -> None:
    run = poisoned(tmp_path, "lg-fedavg", 1e30, when=(2,), reply_bound=None, rounds=4)
    words = (
        r"client 0 .* in round 3.*; the reply of client 3 in round 2 was \d.*e\+.. times as .*reply_bound=100 refuses"
    )
    with pytest.raises(DivergedError, match=words):
        run.run()


def test_a_resumed_run_remembers_what_is_usual(tmp_path: Path) -> None:
    run = poisoned(tmp_path, "fedproto", 1.0)
    run.round(1)
    run.checkpoint()
    saved = run.folder.checkpoints.restore()
    other = poisoned(tmp_path / "other", "fedproto", 1.0)
    other.restore(saved)
    assert other.progress.sizes == run.progress.sizes
    assert len(other.progress.sizes.rounds) == 1
