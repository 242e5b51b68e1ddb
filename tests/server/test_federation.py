"""Rounds: who takes part, which replies count, when clients are scored, and how a run ends badly."""

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import polyfed
from polyfed.engines import SequentialEngine, ThreadsEngine
from polyfed.errors import DivergedError, RunError
from polyfed.evaluation import Evaluation
from polyfed.message import Message, State
from polyfed.methods.base import Reply
from polyfed.server.federation import Federation, Interrupted, Watcher
from tests import support


class Faulty(SequentialEngine):
    """Spoils the messages of some clients: one is not finite, one gives no answer at all."""

    spoiled: tuple[int, ...] = ()
    silent: tuple[int, ...] = ()

    def train(
        self,
        round: int,
        downloads: Mapping[int, Message],
        done: Callable[[int], None] = lambda client: None,
        *,
        score: bool = False,
    ) -> list[Reply]:
        return [self._spoil(reply) for reply in super().train(round, downloads, done)]

    def _spoil(self, reply: Reply) -> Reply:
        if reply.client in self.silent:
            return Reply(reply.client, Message(), failure="no answer within 60 s")
        if reply.client in self.spoiled:
            tensors = {name: tensor * math.nan for name, tensor in reply.message.tensors.items()}
            return Reply(reply.client, Message(tensors, reply.message.metadata), reply.loss)
        return reply


class Watched(SequentialEngine):
    """Remembers which clients it was asked to evaluate."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.asked: list[list[int]] = []
        self.rounds: list[int] = []

    def evaluate(
        self, clients: Iterable[int], round: int, downloads: Mapping[int, Message] | None = None
    ) -> dict[int, Evaluation]:
        self.asked.append(sorted(clients))
        self.rounds.append(round)
        return super().evaluate(self.asked[-1], round, downloads)


def state(federation: Federation, client: int) -> State:
    return {name: tensor.clone() for name, tensor in federation.engine.get_state(client).items()}


def same(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_participants_follow_from_the_seed(tmp_path: Path) -> None:
    settings = {"clients": 10, "participation": 0.3}
    one, same_seed, other = (
        support.federation(tmp_path / str(i), "standalone", seed=seed, **settings) for i, seed in enumerate((0, 0, 1))
    )
    drawn = [one.participants(round) for round in range(1, 41)]
    assert all(len(set(chosen)) == 3 and chosen == sorted(chosen) for chosen in drawn)
    assert drawn == [same_seed.participants(round) for round in range(1, 41)]
    assert drawn != [other.participants(round) for round in range(1, 41)]
    assert {client for chosen in drawn for client in chosen} == set(range(10))


def test_a_bad_reply_is_left_out_with_its_reason(tmp_path: Path) -> None:
    federation = support.federation(tmp_path, "lg-fedavg", engine=Faulty, rounds=1)
    federation.engine.spoiled, federation.engine.silent = (1,), (2,)  # type: ignore[attr-defined]
    federation.run()
    row = federation.folder.rounds().iloc[0]
    assert (row.participants, row.replies) == (4, 2)
    notes = {event["client"]: event["note"] for event in federation.folder.events() if event["event"] == "note"}
    assert notes.keys() == {1, 2}
    assert "not finite" in notes[1]
    assert notes[2].startswith("round 1 continues without client 2: no answer within 60 s")
    assert all(bool(torch.isfinite(tensor).all()) for tensor in federation.server.state.values())


def test_too_few_sound_replies_stop_the_run(tmp_path: Path) -> None:
    federation = support.federation(tmp_path, "lg-fedavg", engine=Faulty, min_replies=3)
    federation.engine.spoiled = (0, 3)  # type: ignore[attr-defined]
    before = {name: tensor.clone() for name, tensor in federation.server.state.items()}
    with pytest.raises(RunError, match=r"round 1 has 2 valid replies and needs 3 \(min_replies\).*events.jsonl"):
        federation.run()
    assert same(federation.server.state, before)  # nothing was fused
    assert not federation.folder.finished
    saved = federation.folder.checkpoints.restore()  # to continue with the next round
    assert saved is not None and saved.round == 1 and set(saved.clients) == {0, 1, 2, 3}


def test_a_run_that_failed_in_its_last_round_can_be_resumed(tmp_path: Path) -> None:
    federation = support.federation(tmp_path, "lg-fedavg", engine=Faulty, min_replies=3, rounds=1)
    federation.engine.spoiled = (0, 3)  # type: ignore[attr-defined]
    with pytest.raises(RunError, match="round 1 has 2 valid replies"):
        federation.run()
    result = polyfed.resume(federation.folder.path, data=support.tiny_dataset(), models=[support.Wide, support.Narrow])
    assert result.rounds.replies.tolist() == [2]
    assert len(result.clients) == 4


def test_rounds_between_evaluations_are_recorded_as_events_only(tmp_path: Path) -> None:
    federation = support.federation(tmp_path, "fedproto", rounds=5, eval_every=2)
    summary = federation.run()
    assert federation.folder.rounds()["round"].tolist() == [2, 4, 5]  # and the last one
    rounds = [event for event in federation.folder.events() if event["event"] == "round"]
    assert [event["round"] for event in rounds] == [1, 2, 3, 4, 5]
    assert summary["upload_floats"] == sum(event["upload_floats"] for event in rounds)


def test_unchanged_clients_are_not_evaluated_again(tmp_path: Path) -> None:
    settings = {"clients": 8, "participation": 0.25, "eval_every": 2, "rounds": 4}
    federation = support.federation(tmp_path, "standalone", engine=Watched, **settings)
    federation.run()
    engine = federation.engine
    assert isinstance(engine, Watched)
    assert engine.asked == [list(range(8)), sorted({*federation.participants(3), *federation.participants(4)})]


def test_scores_after_the_next_download_are_others_and_leave_no_trace(tmp_path: Path) -> None:
    runs = {
        when: support.federation(tmp_path / when, "lg-fedavg", engine=Watched, evaluate=when, split="6:2:2")
        for when in ("after-training", "after-download")
    }
    for run in runs.values():
        run.run()
    trained, downloaded = runs.values()
    assert not trained.folder.rounds().accuracy_mean.equals(downloaded.folder.rounds().accuracy_mean)
    assert all(same(state(trained, client), state(downloaded, client)) for client in range(4))
    assert downloaded.engine.rounds == [2, 3]  # type: ignore[attr-defined]


def test_participants_are_scored_apart_right_after_training(tmp_path: Path) -> None:
    """Two of eight clients train in a round; the mean over these two alone, by every rule and in both parts."""
    settings = {"clients": 8, "participation": 0.25, "rounds": 3, "split": "6:2:2"}
    federation = support.federation(tmp_path, "fedproto", **settings)
    federation.run()
    chosen = federation.participants(3)
    last = federation.folder.evaluations().query("round == 3").set_index(["part", "rule"])
    for (part, rule), row in last.iterrows():
        scores = [federation.progress.latest[client] for client in chosen]
        own = [s.accuracy(rule) if part == "test" else s.validation_accuracy(rule) for s in scores]
        assert row.accuracy_participants == pytest.approx(sum(own) / 2)
    assert (last.accuracy_participants != last.accuracy_mean).any()
    everyone = support.federation(tmp_path / "all", "fedproto", split="6:2:2")
    everyone.run()
    found = everyone.folder.evaluations()
    assert found.accuracy_participants.equals(found.accuracy_mean)


def test_participants_after_a_download_are_not_known(tmp_path: Path) -> None:
    federation = support.federation(tmp_path, "lg-fedavg", evaluate="after-download")
    federation.run()
    assert federation.folder.evaluations().accuracy_participants.isna().all()


def test_a_participant_without_an_answer_is_not_scored_as_one(tmp_path: Path) -> None:
    federation = support.federation(tmp_path, "lg-fedavg", engine=Faulty, rounds=1, clients=2)
    federation.engine.silent = (1,)  # type: ignore[attr-defined]
    federation.run()
    own = federation.folder.evaluations().query("part == 'test'").accuracy_participants
    assert own.tolist() == [federation.progress.latest[0].accuracy()]


def test_fedavg_on_one_client_is_standalone(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"clients": 1, "classes_per_client": 4, "models": (support.Normed,), "rounds": 3}
    alone, averaged = (support.federation(tmp_path / method, method, **settings) for method in ("standalone", "fedavg"))
    alone.run()
    averaged.run()
    assert same(state(alone, 0), state(averaged, 0))
    columns = ["accuracy_mean", "loss_mean", "flops"]
    assert alone.folder.rounds()[columns].equals(averaged.folder.rounds()[columns])


@pytest.mark.parametrize("engine", [SequentialEngine, ThreadsEngine])
def test_a_loss_that_is_not_finite_names_client_round_and_phase(tmp_path: Path, engine: Any) -> None:
    federation = support.federation(tmp_path, "standalone", engine=engine, lr=1e25, rounds=3)
    with pytest.raises(DivergedError, match=r"client \d .* round \d, phase 'model': lower the learning rate"):
        federation.run()
    federation.engine.close()


def test_rounds_and_replies_build_no_networks(tmp_path: Path) -> None:
    """A network is built for the initial weights, its counts and the like, not once more per reply."""

    def built(rounds: int) -> int:
        calls = []

        def factory(input_shape: tuple[int, ...], classes: int) -> support.Wide:
            calls.append(1)
            return support.Wide(input_shape, classes)

        support.federation(tmp_path / str(rounds), "lg-fedavg", models=(factory,), rounds=rounds).run()
        return len(calls)

    assert built(4) == built(1) < 15


def test_costs_are_the_messages_own(tmp_path: Path) -> None:
    """LG-FedAvg sends the head, (6 + 1) · 4 floats, up and down for each of 2 participants."""
    federation = support.federation(tmp_path, "lg-fedavg", rounds=2, participation=0.5)
    federation.run()
    rounds = federation.folder.rounds()
    assert rounds.upload_floats.tolist() == rounds.download_floats.tolist() == [56, 56]
    assert (rounds.upload_bytes > rounds.download_bytes).all()  # the number of samples rides along
    assert rounds.download_bytes.tolist() == [2 * len(federation.download(0).to_bytes())] * 2


def test_a_run_asked_to_stop_ends_after_its_round_with_a_checkpoint(tmp_path: Path) -> None:
    class Stopping(Watcher):
        def on_round(self, round: int, row: Mapping[str, Any] | None) -> None:
            self.stop_requested = round == 2

    federation = support.federation(tmp_path, "fedproto", rounds=4)
    federation.watcher = Stopping()
    with pytest.raises(Interrupted, match=r"stopped after round 2 of 4; continue with `polyfed resume .*run`"):
        federation.run()
    saved = federation.folder.checkpoints.restore()
    assert saved is not None
    assert (saved.round, saved.clients.keys()) == (2, {0, 1, 2, 3})


def test_a_watcher_is_told_of_clients_rounds_and_notes(tmp_path: Path) -> None:
    told: list[Any] = []

    class Listening(Watcher):
        def on_start(self, config: Any, first_round: int) -> None:
            told.append(("start", first_round))

        def on_client(self, round: int, client: int) -> None:
            told.append((round, client))

        def on_round(self, round: int, row: Mapping[str, Any] | None) -> None:
            told.append(("round", round, row is None))

    federation = support.federation(tmp_path, "standalone", clients=2, eval_every=2)
    federation.watcher = Listening()
    federation.run()
    assert told == [("start", 1), (1, 0), (1, 1), ("round", 1, True), (2, 0), (2, 1), ("round", 2, False)]


def test_a_batch_of_one_is_left_out_where_batch_norm_can_not_take_it(tmp_path: Path) -> None:
    """24 training samples in batches of 23 leave one over; every round keeps a note of it, but it is shown once."""
    shown: list[str] = []

    class Listening(Watcher):
        def on_note(self, note: str) -> None:
            shown.append(note)

    settings: dict[str, Any] = {"models": (support.Normed,), "partition": "iid", "batch_size": 23}
    federation = support.federation(tmp_path, "standalone", clients=4, **settings)
    federation.watcher = Listening()
    assert [len(own.train) for own in federation.engine.population.data.values()] == [24] * 4
    federation.run()
    words = "phase 'model': a last batch was left out because it was too small for batch norm"
    assert shown == [f"clients 0, 1, 2 and 3: {words}"]
    notes = [event for event in federation.folder.events() if event["event"] == "note"]
    assert [note["clients"] for note in notes] == [[0, 1, 2, 3]] * 2


def test_a_remark_is_shown_only_of_clients_of_whom_it_was_not_shown_before(tmp_path: Path) -> None:
    shown: list[str] = []
    federation = support.federation(tmp_path, "standalone")
    monkeypatched = Watcher()
    monkeypatched.on_note = shown.append  # type: ignore[method-assign]
    federation.watcher = monkeypatched
    for clients in ([3, 5], [3, 4, 5], [4], list(range(60))):
        federation._note_remarks([Reply(client, Message(), notes=("odd",)) for client in clients])
    assert shown == ["clients 3 and 5: odd", "client 4: odd", "clients 0, 1, 2 and 54 others: odd"]


@pytest.mark.parametrize("patient", [False, True])
def test_an_engine_is_told_who_trains_next(tmp_path: Path, patient: bool) -> None:
    """Before each round but the last; not where clients come and go, because asking who is there costs messages."""
    told: list[tuple[int, list[int]]] = []
    trained: list[tuple[int, list[int]]] = []

    class Told(SequentialEngine):
        def expect(self, round: int, clients: Iterable[int]) -> None:
            assert len(trained) == round - 2  # before the training of the round before
            told.append((round, list(clients)))

        def train(self, round: int, downloads: Mapping[int, Message], *rest: Any, **options: Any) -> list[Reply]:
            trained.append((round, sorted(downloads)))
            return super().train(round, downloads, *rest, **options)

    Told.patient = patient
    support.federation(tmp_path, "standalone", Told, clients=6, rounds=4, participation=0.5).run()
    assert len(trained) == 4 and told == ([] if patient else trained[1:])


def test_the_server_works_where_clients_of_this_process_do(tmp_path: Path) -> None:
    """Forgetting to say so made FedTGP's rounds thirteen times as long."""

    class Elsewhere(SequentialEngine):
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            self.device = torch.device("meta")

    assert support.federation(tmp_path / "one", "fedtgp", Elsewhere).server.device == torch.device("meta")
    run = support.federation(tmp_path / "two", "fedtgp")
    assert run.server.device == run.engine.device == torch.device("cpu")
