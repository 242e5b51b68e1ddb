"""Who does what when, with workers that are no processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from polyfed.comparison import crew as crews
from polyfed.comparison.crew import Crew


class Desk:
    """Where the workers of a test work: a task is done when the test ends it."""

    def __init__(self) -> None:
        self.hired, self.killed = 0, 0
        self.hires = 99
        """How many can be started."""
        self.refused = threading.Event()
        self.fault: Exception | None = None
        """What happens to those who work when they end."""
        self._changed = threading.Condition()
        self._begun: list[str] = []
        self._ended: set[str] = set()

    @property
    def begun(self) -> list[str]:
        with self._changed:
            return list(self._begun)

    def begin(self, task: str) -> None:
        with self._changed:
            self._begun.append(task)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: {task, "all"} & self._ended, 20)

    def end(self, *tasks: str) -> None:
        with self._changed:
            self._ended |= set(tasks)
            self._changed.notify_all()

    def has_begun(self, number: int) -> list[str]:
        """The tasks that have begun, once there are so many."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._begun) >= number, 20), self._begun
            return list(self._begun)


class Clerk:
    """A worker at the desk."""

    def __init__(self, desk: Desk) -> None:
        if desk.hired >= desk.hires:
            desk.refused.set()
            raise OSError("Cannot allocate memory")
        desk.hired += 1
        self._desk = desk

    def do(self, task: Mapping[str, Any], hear: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        (name,) = task
        self._desk.begin(name)
        if self._desk.fault:
            raise self._desk.fault
        return {"done": name}

    def stop(self) -> None: ...

    def join(self) -> None: ...

    def kill(self) -> None:
        self._desk.killed += 1
        self._desk.end("all")


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    made = Desk()
    monkeypatch.setattr(crews, "Worker", lambda threads: Clerk(made))
    yield made
    made.end("all")


@contextmanager
def at_work(number: int, tasks: str, **rest: Any) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """A crew at work in another thread on tasks of one letter each; at the end all has been answered."""
    answers: list[tuple[str, dict[str, Any]]] = []

    def work() -> None:
        with suppress(ZeroDivisionError), Crew(number) as crew:
            answers.extend(crew.work({task: {task: {}} for task in tasks}, **rest))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield answers
    thread.join(20)
    assert not thread.is_alive()


def test_all_work_again_once_more_may_begin(desk: Desk) -> None:
    """While one is at work nothing else may begin; afterwards both workers have something to do."""
    refused = threading.Event()

    def may_begin(task: str) -> bool:
        if task == "c" and not ended:
            refused.set()
        return task == "a" or ended

    ended = False
    with at_work(2, "abc", may_begin=may_begin) as answers:
        assert desk.has_begun(1) == ["a"] and refused.wait(20)
        ended = True
        desk.end("a")
        assert sorted(desk.has_begun(3)) == ["a", "b", "c"]
        desk.end("all")
    assert sorted(task for task, _ in answers) == ["a", "b", "c"]


def test_what_may_not_begin_when_all_others_have_ended_is_left_out(desk: Desk) -> None:
    desk.end("all")
    with at_work(3, "abcd", may_begin=lambda task: task in "bd") as answers:
        pass
    assert sorted(task for task, _ in answers) == ["b", "d"]


def test_a_stop_ends_those_who_wait_for_others(desk: Desk) -> None:
    stop = threading.Event()
    with at_work(3, "abc", may_begin=lambda task: task == "a", stop_requested=stop.is_set) as answers:
        desk.has_begun(1)
        stop.set()
        desk.end("a")
    assert [task for task, _ in answers] == ["a"] and desk.begun == ["a"]


def test_a_fault_ends_those_who_wait_for_others(desk: Desk) -> None:
    refused = threading.Event()
    desk.fault = ZeroDivisionError()
    with at_work(2, "ab", may_begin=lambda task: task == "a" or refused.set() or False) as answers:
        assert desk.has_begun(1) and refused.wait(20)
        desk.end("a")
    assert not answers


def test_nothing_begins_after_a_stop(desk: Desk) -> None:
    stop = threading.Event()
    with at_work(1, "abc", stop_requested=stop.is_set):
        desk.has_begun(1)
        stop.set()
        threading.Event().wait(0.5)  # the crew looks five times a second
        desk.end("all")
    assert desk.begun == ["a"]


def test_one_is_asked_about_at_a_time(desk: Desk) -> None:
    inside, most = [0], [0]

    def may_begin(task: str) -> bool:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        threading.Event().wait(0.05)
        inside[0] -= 1
        return True

    desk.end("all")
    with at_work(4, "abcdefgh", may_begin=may_begin) as answers:
        pass
    assert most == [1] and len(answers) == 8


def test_a_worker_that_can_t_be_started_costs_one_task_and_no_other_worker(desk: Desk) -> None:
    """Memory may be short for a while: the worker that is there does the rest."""
    desk.hires = 1
    with at_work(2, "abc") as answers:
        (first,) = desk.has_begun(1)
        assert desk.refused.wait(20)
        desk.end("all")
    reasons = {task: answer["reason"] for task, answer in answers if "reason" in answer}
    assert len(answers) == 3 and len(reasons) == 1 and first not in reasons and desk.killed == 0
    assert reasons.popitem()[1] == "its process could not be started: Cannot allocate memory"
