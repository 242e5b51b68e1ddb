"""Runs side by side, so that their clients can train together.

Each run is a thread, but only one of them works at a time: the one that holds the baton. A run releases it while it
waits for its clients. When all runs wait, the last one to arrive trains the clients of all of them. So nothing else
needs a lock, and a run's own code is the same as if it were alone.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from contextvars import ContextVar, copy_context
from dataclasses import replace
from typing import Any

from polyfed.data import Dataset
from polyfed.engines.base import EngineSettings, default_memory_budget
from polyfed.engines.together.fit import misfit
from polyfed.engines.together.joint import CannotStack, JointEngine
from polyfed.engines.together.member import Member, Request
from polyfed.engines.vectorized import VectorizedEngine
from polyfed.errors import DivergedError, first_line
from polyfed.population import Population

MOST_RETRIES = 3
"""How often runs try again to train together after a failure; a GPU that others use too may fail once."""
PATIENCE = 10.0
"""Seconds that an interrupted group waits for its runs to end."""

_current: ContextVar[tuple[Group, str] | None] = ContextVar("current group", default=None)


def current_group() -> tuple[Group, str] | None:
    """The group that the run of this thread belongs to, and the run's name in it."""
    return _current.get()


class Group:
    """Runs whose clients train together where they can."""

    def __init__(self) -> None:
        self._baton = threading.Lock()
        self._works = 0
        """The thread that got the baton last."""
        self._size = 1
        self._unfinished: dict[str, None] = {}
        """The runs that have not ended, in their order."""
        self._begun = threading.Event()
        """Whether the run that was started last has asked for its clients, or ended."""
        self._waiting: dict[str, Request] = {}
        self._members: dict[str, Member] = {}
        self._first: Population | None = None
        self._moved: Dataset | None = None
        """The samples of the first member on the compute device, for all of them."""
        self._joint: JointEngine | None = None
        self._apart = False
        """Whether runs work one after another, because they can't train together."""
        self._worked, self._retries = False, MOST_RETRIES
        """Whether the common engine has answered, and how often one that fails after that is replaced."""
        self._cancelled = False
        self._errors: dict[str, BaseException] = {}

    # Runs -------------------------------------------------------------------------------------------------------------

    def run(self, works: Mapping[str, Callable[[], object]]) -> dict[str, BaseException]:
        """Call all `works`, each a run, in a thread of its own; returns the errors of those that failed, by name."""
        self._unfinished, self._size = dict.fromkeys(works), len(works)
        threads = [
            threading.Thread(target=copy_context().run, args=(self._do, name, work), daemon=True, name=name)
            for name, work in works.items()
        ]
        try:
            for thread in threads:  # in this order, so that the same runs always form the same cohorts
                self._begun.clear()
                thread.start()
                while not self._begun.wait(0.2):  # wakes up for signals
                    pass
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.2)
        except KeyboardInterrupt:
            self._cancel(threads)
            raise
        return self._errors

    def _cancel(self, threads: Iterable[threading.Thread]) -> None:
        """Interrupt the run that works, let the others end at their next request, and wait for that a while.

        A thread that still computes when Python ends would abort the process.
        """
        self._cancelled, end = True, time.monotonic() + PATIENCE
        begun = [thread for thread in threads if thread.ident is not None]
        _interrupt(self._works)
        if self._baton.acquire(timeout=PATIENCE):
            for thread in threads:
                if thread not in begun:  # the others would wait for it
                    self._leave(thread.name)
            self._baton.release()
        for thread in begun:
            thread.join(max(0.0, end - time.monotonic()))

    def _do(self, name: str, work: Callable[[], object]) -> None:
        _current.set((self, name))
        with self._baton:
            self._works = threading.get_ident()
            try:
                self._check_cancelled()
                work()
            except BaseException as error:
                self._errors[name] = error
            finally:
                self._leave(name)

    def _leave(self, name: str) -> None:
        del self._unfinished[name]
        self._begun.set()
        self._members.pop(name, None)
        if len(self._unfinished) <= 1:
            self._dissolve()
        self._serve()

    def _check_cancelled(self) -> None:
        if self._cancelled:
            raise KeyboardInterrupt

    # Engines ----------------------------------------------------------------------------------------------------------

    def engine(self, run: str, population: Population, settings: EngineSettings) -> VectorizedEngine:
        """The engine of a run: one that trains together with the others, or the run's own if it does not fit."""
        reason = None if self._first is None else misfit(self._first, population)
        if reason is not None:
            engine = VectorizedEngine.create(population, settings)
            engine.notes.append(f"this run does not train together with the others: {reason}")
            return engine
        if self._first is None or self._moved is None:
            self._first, self._moved = population, population.on_device().dataset
        shared = replace(population.dataset, images=self._moved.images, labels=self._moved.labels)
        budget = settings.memory_budget
        budget = default_memory_budget(population.device) if budget is None else budget
        member = Member(self, run, replace(population, dataset=shared), budget // self._size)
        self._members[run] = member
        return member

    # Requests ---------------------------------------------------------------------------------------------------------

    def ask(self, request: Request) -> Any:
        """Wait until the request is answered, and let other runs work meanwhile."""
        self._check_cancelled()
        if self._apart:
            request.answer_alone()
        else:
            self._waiting[request.member.run] = request
            self._begun.set()
            self._serve()
            if not request.ready.is_set():
                self._baton.release()
                try:
                    request.ready.wait()
                finally:  # even if the interruption was meant for the work before
                    self._baton.acquire()
                    self._works = threading.get_ident()
        if request.error is not None:
            raise request.error
        return request.answer

    def _serve(self) -> None:
        """If all runs wait, answer those that are furthest behind; the others wait until these have caught up."""
        if not self._unfinished or self._waiting.keys() != self._unfinished.keys():
            return
        waiting = [self._waiting[name] for name in self._unfinished]
        behind = min(request.position for request in waiting)
        chosen = [request for request in waiting if request.position == behind or self._cancelled]
        for likeness in dict.fromkeys(request.likeness for request in chosen):
            same = [request for request in chosen if request.likeness == likeness]
            try:
                self._answer(same)
            except BaseException as error:  # nobody else would tell these runs, and they would wait for ever
                for request in same:
                    request.error = request.error or error
        for request in chosen:
            del self._waiting[request.member.run]
            request.ready.set()

    def _answer(self, requests: list[Request]) -> None:
        if self._cancelled:
            for request in requests:
                request.error = KeyboardInterrupt()
            return
        if len(requests) > 1 and not self._apart:
            self._answer_together(requests)
            return
        for request in requests:
            request.answer_alone()

    def _answer_together(self, requests: list[Request]) -> None:
        """Answer by one call for all; what that could not do, each run does by itself, and may fail by itself."""
        found: dict[Request, dict[int, Any]] = {request: {} for request in requests}
        reason = self._call_for_all(dict(found))
        self._pass_notes()
        for request, own in found.items():
            left = [client for client in request.clients if client not in own]
            try:
                rest = request.member.alone(request, left) if left else ()
                if left:
                    request.member.release()
            except BaseException as error:
                request.error = error
                continue
            if request.kind == "train":
                own |= {reply.client: reply for reply in rest}
                request.answer = [own[client] for client in sorted(own)]
            else:
                request.answer = dict(sorted({**own, **dict(rest)}.items()))
        # A run that fails by itself leaves; it is no reason for the others to part.
        if reason is not None and not any(request.error for request in requests):
            self._part(reason)

    def _call_for_all(self, found: dict[Request, dict[int, Any]]) -> str | None:
        """Fill `found` by one call for all requests; returns why that is impossible, or None.

        If the training of a run diverges, the call is repeated without that run. A call that fails although there was
        one before is repeated with a new engine. What is missing in `found` afterwards is left to each run.
        """
        while len(found) > 1:
            failure = None
            try:
                self._call(self._common_engine(), found)
                self._worked = True
                return None
            except DivergedError as error:
                places = self._joint.places if self._joint else {}
                diverged = places[error.client][0] if error.client in places else None
            except (Exception, SystemExit) as error:  # a user's code that exits ends its own run, not the others
                cause = error.__cause__ or error  # alone: clients have other numbers in their runs
                if isinstance(cause, CannotStack) or not self._worked or self._retries == 0:
                    return first_line(cause)
                failure = first_line(cause)
            if failure is not None:  # out here, the error no longer holds on to the memory of what failed
                self._start_anew(failure)
                continue
            kept = {request: own for request, own in found.items() if request.member is not diverged}
            if len(kept) == len(found):
                return None
            found = kept
        return None

    def _common_engine(self) -> JointEngine:
        if self._joint is None:
            for member in self._members.values():
                member.release()  # what it has kept from catching up
            self._joint = JointEngine(list(self._members.values()))
        return self._joint

    def _call(self, joint: JointEngine, found: Mapping[Request, dict[int, Any]]) -> None:
        """Train or evaluate all clients that have no answer yet, and file the answers by request."""
        of_member = {request.member: request for request in found}
        first = next(iter(found))
        numbers = {
            joint.numbers[request.member, client]: (request, client)
            for request, own in found.items()
            for client in request.clients
            if client not in own
        }
        downloads = {
            number: request.downloads[client]
            for number, (request, client) in numbers.items()
            if request.downloads is not None and client in request.downloads
        }
        if first.kind == "evaluate":
            scores = joint.evaluate(numbers, first.round, None if first.downloads is None else downloads)
            for number, score in scores.items():
                request, client = numbers[number]
                found[request][client] = score
            return
        following = first.round + 1
        coming = {request.member: request.member.expected_in(following) for request in found}
        joint.expect(following, [joint.numbers[member, client] for member, own in coming.items() for client in own])
        for replies in joint.answers(first.round, downloads):
            for reply in replies:
                member, client = joint.places[reply.client]
                found[of_member[member]][client] = replace(reply, client=client)
                of_member[member].done(client)

    def _pass_notes(self) -> None:
        """Give every run the notes of the common engine, which concern them all."""
        if self._joint is not None:
            for member in self._members.values():
                member.notes += self._joint.notes
            self._joint.notes.clear()

    def _start_anew(self, reason: str) -> None:
        """Let a new engine try what the common one could do before."""
        self._worked, self._retries = False, self._retries - 1
        self._dissolve(f"training together failed and is tried again: {reason}")

    def _part(self, reason: str) -> None:
        """Let the runs work one after another from now on."""
        self._apart = True
        self._dissolve(f"the runs do not train together: {reason}")

    def _dissolve(self, *notes: str) -> None:
        """Close the common engine, and note why in every run."""
        for member in self._members.values():
            member.notes += notes
        joint, self._joint = self._joint, None
        if joint is not None:
            with suppress(RuntimeError):  # a GPU that has failed; the runs will find that out themselves
                joint.close()


def _interrupt(thread: int) -> None:
    """Raise a KeyboardInterrupt in a thread of that number, as Ctrl-C does in the main thread."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(KeyboardInterrupt))
