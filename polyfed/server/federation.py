"""One round after another: choose, send, train, receive, check, fuse, evaluate, record, checkpoint."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping
from contextlib import closing, suppress
from typing import Any, NoReturn

import torch

from polyfed import confusion
from polyfed.compute import out_of_memory
from polyfed.config import Experiment
from polyfed.devices import Device, new_clock
from polyfed.engines.base import Engine
from polyfed.errors import RunError
from polyfed.evaluation import Score
from polyfed.message import Message
from polyfed.methods.base import Method, Reply, Server
from polyfed.profile import Profile, check_common, named, samples_known
from polyfed.records import Restored, RunFolder
from polyfed.records.claim import resume_command
from polyfed.records.states import misfit
from polyfed.server.participants import participants
from polyfed.server.records import client_rows, evaluation_rows, message_shapes
from polyfed.server.replies import MOST_SAMPLES, Door
from polyfed.server.scores import SCORES, Best, Progress, about_balance
from polyfed.server.unsaved import is_unsaved, unsaved
from polyfed.server.watcher import Interrupted, Watcher

__all__ = ["Federation", "Interrupted", "Watcher"]

CHECKPOINT_SHARE = 0.03


class Federation:
    """The server's side of a run: it owns the server's state and the records, and talks to clients by messages."""

    def __init__(
        self,
        config: Experiment,
        method: Method,
        engine: Engine,
        folder: RunFolder,
        watcher: Watcher | None = None,
        *,
        device: torch.device | None = None,
        devices: Mapping[int, Device] | None = None,
        card: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = config
        self._card = card
        self._clock = new_clock(config.devices, config.deadline, devices)
        self.method = method
        self.engine = engine
        self.folder = folder
        self.watcher = watcher or Watcher()
        self.watcher.folder = folder.path
        self.progress = Progress()
        check_common(method, self.profiles)
        self.server = Server(config.seed, device or engine.device)
        self.method.start(self.server)
        most_samples = config.count_bound or samples_known(self.profiles.values()) or MOST_SAMPLES
        self.door = Door(self.method, config.reply_bound, most_samples)
        self._shown: set[str] = set()
        self._failed_rounds = 0
        self._checkpoint_seconds = 0.0
        self._last_checkpoint = time.perf_counter()

    @property
    def profiles(self) -> Mapping[int, Profile]:
        """What is known about each client that has joined."""
        return self.engine.profiles

    @property
    def stop_requested(self) -> bool:
        """Whether the watcher wants the run to end."""
        return self.watcher.stop_requested

    def restore(self, saved: Restored) -> None:
        """Continue from a checkpoint."""
        self.server.round = saved.round
        try:
            self.server.load(saved.server)
        except RuntimeError as error:
            raise misfit("the server") from error
        self.method.forget(self.server, saved.lost)
        self.progress = Progress.from_dict(saved.progress)
        self.engine.restore(saved.round, saved.clients)
        self.engine.recall(self.progress.engine)

    def run(self) -> dict[str, Any]:
        """Run all rounds that are left and return the summary."""
        self.watcher.on_start(self.config, self.server.round + 1)
        for note in self.engine.remarks if self.server.round == 0 else ():
            self.note(note)
        with closing(self.server.kept):
            for number in range(self.server.round + 1, self.config.rounds + 1):
                self.round(number)
                if self.stop_requested and number < self.config.rounds:
                    self._stop()
                if self._checkpoint_is_due(number):
                    self.checkpoint()
        return self._finish()

    def _stop(self) -> NoReturn:
        self.checkpoint()
        raise Interrupted(
            f"stopped after round {self.server.round} of {self.config.rounds}; "
            f"continue with `{resume_command(self.folder.path)}`."
        )

    def checkpoint(self) -> None:
        """Write a checkpoint of the last finished round."""
        begin = time.perf_counter()
        self._look_for_unsaved()
        self.progress.engine = dict(self.engine.remembered())
        try:
            self.folder.save(self.server.round, self.server.named_state(), self.progress.to_dict(), self.engine.states)
        except (OSError, MemoryError, RuntimeError) as error:
            # A full disk or a lack of memory must not end a run: the previous checkpoint is still there.
            if not isinstance(error, OSError) and not out_of_memory(error):
                raise
            reason = (error.strerror or str(error)) if isinstance(error, OSError) else "out of memory"
            self.note(f"the checkpoint of round {self.server.round} could not be written ({reason})")
        self._last_checkpoint = time.perf_counter()
        self._checkpoint_seconds = self._last_checkpoint - begin

    def _look_for_unsaved(self) -> None:
        """Remember, for whoever resumes the run, what the method keeps outside of named tensors; say so once."""
        found = unsaved(self.method, self.server)
        if found is not None and found != self.progress.unsaved:
            self.note(is_unsaved(found))
        self.progress.unsaved = found

    def participants(self, round: int) -> list[int]:
        """The clients that take part in a round: a share of those that can be asked."""
        return participants(self.config.seed, round, self.engine.available(), self.config.participation)

    def download(self, client: int) -> Message:
        """What the client receives next."""
        classes = self.profiles[client].classes if self.method.announces_classes else None
        return self.method.download(self.server, client, None if classes is None else torch.tensor(classes))

    def round(self, number: int) -> None:
        """One round, from the choice of participants to its records."""
        self.engine.gather(number, self.config.min_replies, self, self._failed_rounds)
        if self.engine.patient and self.stop_requested:
            self._stop()
        self.server.round = number
        participants = self.participants(number)
        if self._scores_after(number) and self.method.kept_fresh:
            self._score_others(number, participants)
        with self.door.naming_causes(self.progress.sizes):
            row, trained, training_seconds = self._train_and_fuse(number, participants)
        if self._evaluates(number):
            row |= self._evaluate(number, trained)
            self._note_remarks([])  # what the engine says about the evaluation, which may be the run's last
            self.folder.add_round(row)
        self.folder.add_event("round", **row, training_seconds=training_seconds)
        self.watcher.on_round(number, row if "accuracy_mean" in row else None)
        too_few = row["replies"] < self.config.min_replies
        self._failed_rounds = self._failed_rounds + 1 if too_few else 0
        if too_few:
            self._miss_replies(number, row["replies"])

    def _miss_replies(self, number: int, replies: int) -> None:
        """End after a round with too few replies, or keep a checkpoint and a note where clients may come back."""
        found = f"round {number} has {replies} valid replies and needs {self.config.min_replies} (min_replies)"
        if self.engine.patient:
            self.tell(f"{found}: the server learns nothing from it, and the run continues")
        self.checkpoint()
        if self.engine.patient:
            return
        raise RunError(
            f"{found}; the reasons are in {self.folder.path / 'events.jsonl'}, and "
            f"`{resume_command(self.folder.path)}` continues with the next round."
        )

    def _score_others(self, number: int, participants: list[int]) -> None:
        """Score those who sit out this round with what its participants receive: they hold older server knowledge.

        Done before the server learns from the round, so that all clients are scored with the same. Not counted as
        traffic.
        """
        others = sorted(set(self.engine.available()) - set(participants))
        downloads = {client: self.download(client) for client in others}
        self._keep_scores(number, self._scores(others, number, downloads) if others else {})

    def _train_and_fuse(self, number: int, participants: list[int]) -> tuple[dict[str, Any], set[int], float]:
        """The round without its evaluation: its record, who trained, and for how many seconds.

        Messages live no longer than this: some are large.
        """
        begin = time.perf_counter()
        downloads = {client: self.download(client) for client in participants}
        if number < self.config.rounds and not self.engine.patient:  # whose clients come and go
            self.engine.expect(number + 1, self.participants(number + 1))
        replies = self.engine.train(
            number, downloads, lambda client: self.watcher.on_client(number, client), score=self._scores_after(number)
        )
        trained = time.perf_counter()
        self.progress.stale |= set(participants)
        self._keep_scores(number, {r.client: r.evaluation for r in replies if r.evaluation is not None})
        in_time, simulated = self._on_time(replies, downloads)
        sound = self._sound(number, in_time)
        if len(sound) >= self.config.min_replies:
            self.method.aggregate(self.server, sound)
        self._note_remarks(replies)
        costs = {
            "upload_floats": sum(reply.message.floats for reply in replies),
            "download_floats": sum(message.floats for message in downloads.values()),
            "upload_bytes": sum(reply.message.nbytes for reply in replies),
            "download_bytes": sum(message.nbytes for message in downloads.values()),
            "flops": sum(reply.flops for reply in replies),
            "seconds": round(time.perf_counter() - begin, 4),
            **simulated,
        }
        self.progress.add_costs(costs)
        losses = [reply.loss for reply in sound if math.isfinite(reply.loss)]
        row: dict[str, Any] = {
            "round": number,
            "loss_mean": sum(losses) / len(losses) if losses else float("nan"),
            "participants": len(participants),
            "replies": len(sound),
            **costs,
            **message_shapes(number, downloads, sound),
        }
        return row, {reply.client for reply in replies if not reply.failure}, round(trained - begin, 4)

    def _on_time(self, replies: list[Reply], downloads: Mapping[int, Message]) -> tuple[list[Reply], dict[str, float]]:
        """The replies that come before the deadline, and how long the round lasts on the simulated clock if any."""
        if self._clock is None:
            return replies, {}
        needed = {
            reply.client: self._clock.devices[reply.client].seconds(
                reply.flops, reply.message.nbytes, downloads[reply.client].nbytes
            )
            for reply in replies
        }
        late = self._clock.late(needed)
        if late:
            self._note_of(late, f"left out of the round, too slow for the deadline of {self._clock.deadline:g} s")
        in_time = [reply for reply in replies if reply.client not in late]
        return in_time, {"simulated_seconds": self._clock.round_seconds(needed.values())}

    def _note_remarks(self, replies: list[Reply]) -> None:
        """Record remarks on clients, one note for all clients with the same remark, and remarks on the server."""
        remarks: dict[str, list[int]] = {}
        for reply in replies:
            for note in reply.notes:
                remarks.setdefault(note, []).append(reply.client)
        for note, clients in remarks.items():
            self._note_of(clients, note)
        for note in self.engine.notes + self.server.notes:
            self.note(note)
        self.engine.notes.clear()
        self.server.notes.clear()

    def _note_of(self, clients: list[int], note: str) -> None:
        """Keep one note that is true of these clients, and show it of those of whom it has not been shown yet."""
        self.note(f"{named(clients, self.profiles)}: {note}", show=False, clients=clients)
        unheard = [client for client in clients if f"client {client}: {note}" not in self._shown]
        self._shown.update(f"client {client}: {note}" for client in unheard)
        if unheard:
            self.watcher.on_note(f"{named(unheard, self.profiles)}: {note}")

    def _sound(self, number: int, replies: list[Reply]) -> list[Reply]:
        """The replies that can be fused; each of the others is noted with its reason."""
        sound, refused = self.door.admit(number, replies, self.progress.sizes)
        for client, reason in refused.items():
            self.note(f"round {number} continues without {named([client], self.profiles)}: {reason}", client=client)
        self.method.forget(self.server, refused)
        return sound

    def _evaluates(self, number: int) -> bool:
        return number % self.config.eval_every == 0 or number == self.config.rounds

    def _scores_after(self, number: int) -> bool:
        """Whether a participant is to be scored as it is after this round's training."""
        return self._evaluates(number) and self.config.evaluate == "after-training"

    def _evaluate(self, number: int, trained: Collection[int]) -> dict[str, float]:
        """Score all clients that can be asked; one that has not changed, or is away, keeps its last score."""
        there = sorted(self.engine.available())
        if self.config.evaluate == "after-download":
            fresh = self._scores(there, number + 1, {client: self.download(client) for client in there})
        else:
            unknown = set(there) - set(self.progress.latest)
            fresh = self._scores((self.progress.stale & set(there)) | unknown, number)
        self._keep_scores(number, fresh)
        # After a download clients are no longer as they were after training.
        known = set(trained) - self.progress.stale if self.config.evaluate == "after-training" else set()
        return self._record_evaluation(number, dict(sorted(self.progress.latest.items())), known)

    def _scores(
        self, clients: Collection[int], number: int, downloads: Mapping[int, Message] | None = None
    ) -> Mapping[int, Score]:
        try:
            return self.engine.evaluate(clients, number, downloads)
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            raise RunError(
                f"the evaluation of round {number} does not fit into memory, not even sample by sample: use smaller "
                "networks, keep fewer clients' states in memory (--set memory_budget=4), or use the CPU (--device cpu)."
            ) from error

    def _keep_scores(self, number: int, fresh: Mapping[int, Score]) -> None:
        if self.config.confusion == "none":
            fresh = {client: score.without_confusion() for client, score in fresh.items()}
        self.progress.stale -= set(fresh)
        self.progress.latest |= fresh
        for client, score in fresh.items():  # a score that did not change is neither better nor worse
            best = self.progress.clients.setdefault(client, Best())
            best.add(number, score.accuracy(), score.validation_accuracy())

    def _record_evaluation(
        self, number: int, latest: Mapping[int, Score], trained: Collection[int]
    ) -> dict[str, float]:
        if not latest:
            return dict.fromkeys(SCORES, math.nan)
        participants = {client: score for client, score in latest.items() if client in trained}
        elapsed = self.progress.totals.get("simulated_seconds", math.nan)
        table = evaluation_rows(number, latest, participants, elapsed)
        self.folder.add_evaluations(table.values())
        own = next(iter(latest.values())).rules[0]
        test, validation = table["test", own], table["validation", own]
        self.progress.federation.add(number, test["accuracy_mean"], validation["accuracy_mean"])
        counts = {client: dict(score.confusion) for client, score in latest.items()}
        if self.config.confusion == "every":
            self.folder.add_confusion(confusion.rows(number, counts))
        elif self.config.confusion == "ends" and self.progress.federation.best_validation_round == number:
            self.progress.best_confusion = counts
        return {name: test[name] for name in SCORES}

    def _checkpoint_is_due(self, number: int) -> bool:
        if number == self.config.rounds:
            return False
        if self.config.checkpoint_every is not None:
            return number % self.config.checkpoint_every == 0
        return time.perf_counter() - self._last_checkpoint > max(1.0, self._checkpoint_seconds / CHECKPOINT_SHARE)

    def note(self, note: str, *, show: bool = True, **details: Any) -> None:
        """Keep a remark as an event of the run, and show it if it has not been shown yet."""
        with suppress(OSError):  # a remark about a full disk may not fit on it
            self.folder.add_event("note", round=self.server.round, note=note, **details)
        if show and note not in self._shown:
            self._shown.add(note)
            self.watcher.on_note(note)

    def tell(self, note: str) -> None:
        """Keep a note and show it now, even if the same was shown before."""
        self._shown.discard(note)
        self.note(note)

    def on_members(self, present: Mapping[int, str], absent: Mapping[int, str]) -> None:
        """Pass on who is there."""
        self.watcher.on_members(present, absent)

    def _finish(self) -> dict[str, Any]:
        best = self.progress.federation
        summary = {
            "method": self.method.name,
            "rounds": self.config.rounds,
            **self.engine.about,
            "accuracy_final": best.final,
            "accuracy_at_best_validation": best.at_best_validation,
            "best_validation_round": best.best_validation_round,
            "accuracy_best": best.best,
            "best_round": best.best_round,
            **about_balance(self.progress.latest, self.method.task.classes),
            **self.progress.totals,
        }
        if self.config.confusion == "ends":
            self._record_ends()
        self._look_for_unsaved()  # the run may be continued to more rounds
        self.folder.finish(
            self.server.round,
            self.server.named_state(),
            self.progress.to_dict(),
            client_rows(self.profiles, self.progress),
            self.engine.states,
            summary,
            None if self.engine.states is None else self._card,
        )
        return summary

    def _record_ends(self) -> None:
        """Write what was predicted as what in the round best on validation and in the last."""
        best, last = self.progress.federation.best_validation_round, self.server.round
        if best != last:
            self.folder.add_confusion(confusion.rows(best, self.progress.best_confusion))
        counts = {client: dict(score.confusion) for client, score in self.progress.latest.items()}
        self.folder.add_confusion(confusion.rows(last, counts))
