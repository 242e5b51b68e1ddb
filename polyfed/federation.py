"""One round after another: choose, send, train, receive, check, fuse, evaluate, record, checkpoint."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from polyfed.compute import out_of_memory
from polyfed.config import Experiment
from polyfed.engines import Engine, Evaluation, Population
from polyfed.engines.population import state_of
from polyfed.errors import InputError, RunError, clients_named
from polyfed.message import Message, State
from polyfed.methods.base import Reply, Server
from polyfed.records import Restored, RunFolder
from polyfed.replies import Door
from polyfed.scores import Best, Part, Progress, summarise
from polyfed.seeds import numpy_generator

CHECKPOINT_SHARE = 0.03


class Watcher:
    """Is told how a run goes on; the default says nothing. The command line shows progress with one."""

    stop_requested = False
    """Set it, and the run ends after the round in progress, with a checkpoint."""
    folder: Path | None = None
    """The run's folder, as soon as there is one."""

    def on_start(self, config: Experiment, first_round: int) -> None: ...

    def on_client(self, round: int, client: int) -> None: ...

    def on_round(self, round: int, row: Mapping[str, Any] | None) -> None:
        """`row` is what rounds.csv gets, or None for a round without evaluation."""

    def on_note(self, note: str) -> None: ...


class Interrupted(RunError):
    """The run was asked to stop and can be resumed."""

    exit_status = 130


class Federation:
    """The server's side of a run: it owns the server's state and the records, and talks to clients by messages."""

    def __init__(
        self,
        config: Experiment,
        population: Population,
        engine: Engine,
        folder: RunFolder,
        watcher: Watcher | None = None,
    ) -> None:
        self.config = config
        self.population = population
        self.method = population.method
        self.engine = engine
        self.folder = folder
        self.watcher = watcher or Watcher()
        self.watcher.folder = folder.path
        self.progress = Progress()
        self.server = Server(config.seed, population.device)
        self.method.start(self.server)
        most_samples = config.count_bound or max(len(data.train) for data in population.data)
        self.door = Door(self.method, config.reply_bound, most_samples)
        self._shown: set[str] = set()
        self._checkpoint_seconds = 0.0
        self._last_checkpoint = time.perf_counter()

    def restore(self, saved: Restored) -> None:
        """Go on where a checkpoint stands."""
        self.server.round = saved.round
        modules = {name: t for name, t in saved.server.items() if name.startswith("modules.")}
        try:
            self.server.modules.load_state_dict({name.removeprefix("modules."): t for name, t in modules.items()})
        except RuntimeError as error:
            raise self._misfit("the server") from error
        self.server.state = {n.removeprefix("state."): t for n, t in saved.server.items() if n not in modules}
        self.progress = Progress.from_dict(saved.progress)
        expected: dict[str, dict[str, torch.Size]] = {}
        for client, state in saved.clients.items():
            if client >= len(self.population.data):
                raise self._misfit(f"client {client}")
            name = self.population.architectures[client].name
            if name not in expected:
                expected[name] = _shapes(state_of(self.population.new_network(client)))
            if _shapes(state) != expected[name]:
                raise self._misfit(f"client {client}")
            self.engine.set_state(client, state)
        self.engine.mark_saved()

    def _misfit(self, whose: str) -> InputError:
        return InputError(
            f"the checkpoint's state of {whose} does not fit the run's networks and method: resume with the settings "
            "that the run had, or start a new one."
        )

    def run(self) -> dict[str, Any]:
        """Run all rounds that are left and return the summary."""
        self.watcher.on_start(self.config, self.server.round + 1)
        for note in self.population.notes if self.server.round == 0 else ():
            self.note(note)
        for number in range(self.server.round + 1, self.config.rounds + 1):
            self.round(number)
            if self.watcher.stop_requested and number < self.config.rounds:
                self.checkpoint()
                raise Interrupted(
                    f"stopped after round {number} of {self.config.rounds}; "
                    f"go on with `polyfed resume {self.folder.path}`."
                )
            if self._checkpoint_is_due(number):
                self.checkpoint()
        return self._finish()

    def checkpoint(self) -> None:
        """Write a checkpoint of the last finished round."""
        begin = time.perf_counter()
        try:
            self.folder.save(
                self.server.round,
                self._server_state(),
                self.progress.to_dict(),
                self.engine.changed_clients(),
                self.engine.get_state,
            )
            self.engine.mark_saved()
        except (OSError, MemoryError, RuntimeError) as error:
            # A full disk or a lack of memory must not end a run: the checkpoint before is still there.
            if not isinstance(error, OSError) and not out_of_memory(error):
                raise
            reason = (error.strerror or str(error)) if isinstance(error, OSError) else "out of memory"
            self.note(f"the checkpoint of round {self.server.round} could not be written ({reason})")
        self._last_checkpoint = time.perf_counter()
        self._checkpoint_seconds = self._last_checkpoint - begin

    def _server_state(self) -> State:
        """All that the server remembers, as named tensors."""
        state: State = {f"state.{name}": tensor for name, tensor in self.server.state.items()}
        return state | {f"modules.{name}": tensor for name, tensor in self.server.modules.state_dict().items()}

    def participants(self, round: int) -> list[int]:
        """The clients that take part in a round."""
        if self.config.participants == self.config.clients:
            return list(range(self.config.clients))
        draw = numpy_generator(self.config.seed, "participants", round)
        return sorted(draw.choice(self.config.clients, self.config.participants, replace=False).tolist())

    def download(self, client: int) -> Message:
        """What the client receives next."""
        classes = self.population.knowledge(client, self.server.round).classes
        return self.method.download(self.server, client, classes if self.method.announces_classes else None)

    def round(self, number: int) -> None:
        """One round, from the choice of participants to its records."""
        with self.door.naming_causes(self.progress.sizes):
            row, training_seconds = self._train_and_fuse(number)
        if number % self.config.eval_every == 0 or number == self.config.rounds:
            row |= self._evaluate(number)
            self.folder.add_round(row)
        self.folder.add_event("round", **row, training_seconds=training_seconds)
        self.watcher.on_round(number, row if "accuracy_mean" in row else None)
        if row["replies"] < self.config.min_replies:
            self.checkpoint()
            raise RunError(
                f"round {number} has {row['replies']} sound replies and needs {self.config.min_replies} (min_replies); "
                f"the reasons are in {self.folder.path / 'events.jsonl'}, and `polyfed resume {self.folder.path}` goes "
                "on with the next round."
            )

    def _train_and_fuse(self, number: int) -> tuple[dict[str, Any], float]:
        """The round without its evaluation: its record, and how many seconds clients trained.

        Messages live no longer than this: some are large.
        """
        begin = time.perf_counter()
        self.server.round = number
        participants = self.participants(number)
        downloads = {client: self.download(client) for client in participants}
        replies = self.engine.train(number, downloads, lambda client: self.watcher.on_client(number, client))
        trained = time.perf_counter()
        self.progress.stale |= set(participants)
        sound = self._sound(number, replies)
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
        }
        self.progress.add_costs(costs)
        losses = [reply.loss for reply in sound if math.isfinite(reply.loss)]
        row: dict[str, Any] = {
            "round": number,
            "loss_mean": sum(losses) / len(losses) if losses else float("nan"),
            "participants": len(participants),
            "replies": len(sound),
            **costs,
        }
        return row, round(trained - begin, 4)

    def _note_remarks(self, replies: list[Reply]) -> None:
        """Keep what was remarked on clients, one note for all of whom the same is said, and on the server."""
        remarks: dict[str, list[int]] = {}
        for reply in replies:
            for note in reply.notes:
                remarks.setdefault(note, []).append(reply.client)
        for note, clients in remarks.items():
            self.note(f"{clients_named(clients)}: {note}", show=False, clients=clients)
            unheard = [client for client in clients if f"client {client}: {note}" not in self._shown]
            self._shown.update(f"client {client}: {note}" for client in unheard)
            if unheard:
                self.watcher.on_note(f"{clients_named(unheard)}: {note}")
        for note in self.engine.notes + self.server.notes:
            self.note(note)
        self.engine.notes.clear()
        self.server.notes.clear()

    def _sound(self, number: int, replies: list[Reply]) -> list[Reply]:
        """The replies that can be fused; every other is noted with its reason."""
        sound, refused = self.door.admit(number, replies, self.progress.sizes)
        for client, reason in refused.items():
            self.note(f"round {number} goes on without client {client}: {reason}", client=client)
        return sound

    def _evaluate(self, number: int) -> dict[str, float]:
        """Score all clients; a client that has not changed keeps its last score."""
        if self.config.evaluate == "after-download":
            clients = range(self.config.clients)
            fresh = self.engine.evaluate(clients, number + 1, {client: self.download(client) for client in clients})
        else:
            unknown = set(range(self.config.clients)) - set(self.progress.latest)
            fresh = self.engine.evaluate(self.progress.stale | unknown, number)
        self.progress.stale.clear()
        self.progress.latest |= fresh
        latest = {client: self.progress.latest[client] for client in range(self.config.clients)}
        for client, score in fresh.items():  # a score that did not change is neither better nor worse
            best = self.progress.clients.setdefault(client, Best())
            best.add(number, score.accuracy(), score.validation_accuracy())
        return self._record_evaluation(number, latest)

    def _record_evaluation(self, number: int, latest: Mapping[int, Evaluation]) -> dict[str, float]:
        rules = list(latest[0].test_correct)
        parts: tuple[Part, ...] = ("test", "validation")
        table = {(part, rule): summarise(latest, part, rule) for part in parts for rule in rules}
        self.folder.add_evaluations(
            {"round": number, "part": part, "rule": rule, **values} for (part, rule), values in table.items()
        )
        own = rules[0]
        test, validation = table["test", own], table["validation", own]
        self.progress.federation.add(number, test["accuracy_mean"], validation["accuracy_mean"])
        return test

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

    def _finish(self) -> dict[str, Any]:
        rows = []
        for client, data in enumerate(self.population.data):
            best = self.progress.clients[client]
            rows.append(
                {
                    "client": client,
                    "architecture": self.population.architectures[client].name,
                    "parameters": self.population.parameters(client),
                    "train_samples": len(data.train),
                    "validation_samples": len(data.validation),
                    "test_samples": len(data.test),
                    "classes": int((self.population.counts[client] > 0).sum()),
                    "accuracy_final": best.final,
                    "accuracy_at_best_validation": best.at_best_validation,
                    "accuracy_best": best.best,
                }
            )
        best = self.progress.federation
        summary = {
            "method": self.method.name,
            "rounds": self.config.rounds,
            "test_set": self.population.test_set,
            "accuracy_final": best.final,
            "accuracy_at_best_validation": best.at_best_validation,
            "best_validation_round": best.best_validation_round,
            "accuracy_best": best.best,
            "best_round": best.best_round,
            **self.progress.totals,
        }
        self.folder.finish(
            self.server.round, self._server_state(), self.progress.to_dict(), rows, self.engine.get_state, summary
        )
        return summary


def _shapes(state: State) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in state.items()}
