"""What a hostile server can make of a site's state: nothing that its method does not let a download change."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import polyfed
from polyfed.errors import FolderError, InputError
from polyfed.message import Message, State
from polyfed.methods import FedProto
from polyfed.methods.base import Knowledge, Server
from polyfed.remote import Packet, Site
from tests.methods import parity
from tests.remote.support import agreement, setting

RUN = {"run": "run-1", "name": "amber"}


class Attacked:
    """A site after an honest first round, and what an honest server would send it next."""

    def __init__(self, folder: Path, method: Any, **settings: Any) -> None:
        _, people = setting(method, **settings)
        self.folder, self.method, self.own = folder, people.method, people.slice([0])
        self.server = Server(people.seed, round=1)
        self.method.start(self.server)
        agreed = replace(agreement(people), experiment={"evaluate": "after-training"})
        self.site = Site("amber", agreed, self.own, folder)
        assert not self.ask(1, self.download()).failed
        self.before = self.state()

    def download(self) -> Message:
        classes = self.own.knowledge(0, 1).classes if self.method.announces_classes else None
        return self.method.download(self.server, 0, classes)

    def ask(self, round: int, message: Message | None, kind: Any = "train") -> Packet:
        return self.site.answer(kind, Packet({**RUN, "round": round}, message))

    def state(self) -> State:
        self.site._go_to(self.site._diary.newest)
        return {name: tensor.clone() for name, tensor in self.site._engine.get_state(0).items()}

    def assert_refused(self, message: Message, reason: str, kind: Any = "train", round: int = 2) -> None:
        answer = self.ask(round, message, kind)
        assert answer.failed and answer.message is None
        assert reason in answer.facts["failure"], answer.facts
        after = self.state()
        assert all(torch.equal(after[name], tensor) for name, tensor in self.before.items())
        assert self.site._diary.newest is not None and self.site._diary.newest.round == 1


@pytest.mark.parametrize("method", [*polyfed.METHODS, *parity.OPTIONS])
def test_a_download_changes_nothing_beyond_its_method(tmp_path: Path, method: Any) -> None:
    """Its private extractor is safe from the server, unless the whole network is what clients have in common."""
    attacked = Attacked(tmp_path, parity.OPTIONS.get(method, method))
    assert attacked.method.receivable is not None, "say in `receives` which modules a download may change"
    honest = attacked.download()
    name = next(name for name in attacked.before if name.startswith("model.extractor."))
    forged = Message({**honest.tensors, name: torch.zeros_like(attacked.before[name])}, honest.metadata)
    if "network" in attacked.method.requires:
        assert not attacked.ask(2, forged).failed
        return
    answer = attacked.ask(2, forged)
    after = attacked.state()
    assert answer.failed or not torch.equal(after[name], torch.zeros_like(after[name]))
    assert answer.failed or forged.tensors.keys() - honest.tensors.keys() == {name}
    if answer.failed:
        assert all(torch.equal(after[key], tensor) for key, tensor in attacked.before.items())
    assert not attacked.ask(2, honest).failed  # nothing is lost: the honest download still counts


WEIGHT = "model.head.weight"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda own: {**own, "model.extractor.0.weight": torch.zeros(3, 1)},
            "'model.extractor.0.weight', but may change only model.head",
        ),
        (lambda own: {**own, "model.head.third": torch.zeros(3)}, "'model.head.third', which is not in a client's"),
        (lambda own: {**own, "anything": torch.zeros(3)}, "'anything', but may change only"),
        (lambda own: {**own, WEIGHT: own[WEIGHT][:1]}, "shape"),
        (lambda own: {**own, WEIGHT: own[WEIGHT].sum()}, "shape ()"),
        (lambda own: {**own, WEIGHT: own[WEIGHT].double()}, "torch.float64"),
        (lambda own: {**own, WEIGHT: own[WEIGHT].long()}, "torch.int64"),
        (lambda own: {**own, WEIGHT: own[WEIGHT] * math.nan}, "not finite"),
        (lambda own: {**own, WEIGHT: own[WEIGHT] + math.inf}, "not finite"),
        (lambda own: {**own, WEIGHT: torch.full_like(own[WEIGHT], 1e20)}, "as large as 1e+20"),
    ],
)
def test_a_download_that_does_not_fit_is_refused(
    tmp_path: Path, change: Callable[[Mapping[str, Tensor]], State], reason: str
) -> None:
    attacked = Attacked(tmp_path, "lg-fedavg")
    attacked.assert_refused(Message(change(attacked.download().tensors)), reason)


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        (torch.tensor([0, 4]), "class outside 0..3"),
        (torch.tensor([-1, 0]), "class outside 0..3"),
        (torch.tensor([1, 1]), "ascending"),
        (torch.tensor([0.0, 1.0]), "torch.float32"),
        (torch.tensor([[0, 1]]), "shape (1, 2)"),
        (torch.tensor([0]), "2 vectors for 1 classes"),
        (None, "not one of fedproto"),
    ],
)
def test_metadata_that_make_no_sense_are_refused(tmp_path: Path, labels: Tensor | None, reason: str) -> None:
    attacked = Attacked(tmp_path, "fedproto")
    size = attacked.before["prototypes.vectors"].shape[1]
    metadata = {} if labels is None else {"labels": labels}
    for kind in ("train", "evaluate", "finish"):
        attacked.assert_refused(Message({"prototypes": torch.zeros(2, size)}, metadata), reason, kind)


def test_a_variance_below_zero_is_refused(tmp_path: Path) -> None:
    """Batch norm takes its root: a private model that received one would predict nothing any more."""
    attacked = Attacked(tmp_path, {"name": "fml"}, auxiliary="tests.support:Normed")
    honest = attacked.download().tensors
    name = next(name for name in honest if name.endswith("running_var"))
    attacked.assert_refused(Message({**honest, name: -honest[name]}), "negative variance")


def test_an_evaluation_brings_nothing_that_the_method_does_not_evaluate_with(tmp_path: Path) -> None:
    """Else a server could have the site score any network that it likes on the site's samples."""
    attacked = Attacked(tmp_path, "lg-fedavg")
    attacked.assert_refused(attacked.download(), "lg-fedavg evaluates with nothing that a server sends", "evaluate")
    assert attacked.ask(1, None, "evaluate").facts.keys() == {"evaluation"}


@pytest.mark.parametrize("round", [0, -1, 5, 10**30, True, 1.5, "2", None, [1]])
@pytest.mark.parametrize("kind", ["train", "evaluate", "finish"])
def test_only_rounds_of_the_run_are_answered(tmp_path: Path, round: Any, kind: Any) -> None:
    """The run has three; a server that could ask for more would train the site for as long as it likes."""
    attacked = Attacked(tmp_path, "fedproto")
    attacked.assert_refused(attacked.download(), "round", kind, round)


class Eager(FedProto):
    """A user's method that forgot to say what it receives."""

    name = "eager"
    kept_fresh = ()
    receives = ("prototypes",)

    def receive(self, state: Mapping[str, Tensor], message: Message, client: Knowledge) -> State:
        return {**super().receive(state, message, client), "model.head.bias": torch.zeros(4)}


class Free(Eager):
    """One that says that everything may change."""

    name = "free"
    receives = None


def test_a_method_that_declares_less_than_it_receives_fails_in_a_simulation_too(tmp_path: Path) -> None:
    from tests import support

    with pytest.raises(InputError, match=r"eager.*'model.head.bias'.*receives"):
        support.federation(tmp_path / "eager", Eager).run()
    support.federation(tmp_path / "free", Free).run()


@pytest.mark.parametrize("share", ["scores", "nothing"])
def test_what_a_failure_says_is_what_the_site_shares(tmp_path: Path, share: Any) -> None:
    """How large a loss has grown is a loss, and a sentence about a folder holds a path: its own notes have both."""
    _, people = setting("standalone", lr=1e30)
    site = Site("amber", agreement(people), people.slice([0]), tmp_path / "private", share=share)
    said = str(site.answer("train", Packet({**RUN, "round": 1})).facts)
    assert ("diverged" in said or "loss" in said or "weights" in said) == (share == "scores")
    assert share == "scores" or any("client 0" in note for note in site.notes)

    def busy(*arguments: Any, **settings: Any) -> Any:
        raise FolderError(f"another process works on '{tmp_path}'.")

    site._engine.train = busy  # type: ignore[method-assign]
    said = str(site.answer("train", Packet({**RUN, "round": 1})).facts)
    assert str(tmp_path) not in said and any(str(tmp_path) in note for note in site.notes)
    assert (tmp_path / "private").stat().st_mode & 0o777 == 0o700
