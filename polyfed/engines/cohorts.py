"""What an engine keeps for its cohorts: stacked states, captured steps and passes, streams, tables of samples."""

from __future__ import annotations

import gc
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping

from polyfed.compute import finish_gpu_work, free_gpu_memory
from polyfed.engines import stacked
from polyfed.engines.base import LocalEngine
from polyfed.engines.stacked.captured import CapturedStep, Stream, stepped
from polyfed.engines.stacked.drawer import Drawer
from polyfed.engines.stacked.layers import trouble
from polyfed.engines.stacked.receiving import receive_all
from polyfed.engines.stacked.replays import CohortReplays, Replays
from polyfed.engines.stacked.tables import Tables
from polyfed.engines.stacked.trial import Trial
from polyfed.message import Message, State
from polyfed.methods.base import Phase
from polyfed.methods.parts.network import ClientNetwork
from polyfed.population import Population
from polyfed.sameness import same

KEPT_STEPS = 256
"""Captured steps that are kept for later rounds; the least recently used is dropped first."""
SIZES = 4
"""Sizes of cohorts from one power of two to the next. Each has a step of its own to capture and to keep in memory; with
half as many, a tenth of what is computed would be padding where ten of a hundred clients take part in each of three
runs."""


class CohortEngine(LocalEngine):
    """The common part of engines that train clients of one architecture at once."""

    def __init__(self, population: Population, *, memory_budget: int | None = None) -> None:
        super().__init__(population, memory_budget=memory_budget)
        self._steps: OrderedDict[tuple[str, int, str], CapturedStep] = OrderedDict()
        self._stacks: dict[tuple[str, int], stacked.Stack] = {}
        self._held: dict[tuple[str, int], list[tuple[int, int]]] = {}
        """Stacks that hold what was just trained: an evaluation need not copy it back from the store."""
        self._streams: dict[str, Stream] = {}
        self._replays = Replays(self._note)
        self._tables = Tables(self.population)
        # The store is looked up when it is needed: a subclass may have another one.
        self._trial = Trial(
            self.population, self._network, lambda client: self.store.get(client), self._width, self.notes.append
        )
        self._drawer = Drawer(self.population, self._trial, self._width, self._size, self.notes.append)
        self._apart = True
        """Architectures have streams of their own."""
        self._owners = Counter(architecture.name for architecture in population.architectures.values())
        self._longest: dict[str, int] = {}
        for client, own in population.data.items():
            name = population.architectures[client].name
            self._longest[name] = max(self._longest.get(name, 0), len(own.train))
        if population.device.type == "cuda" and trouble():
            self.notes.append(f"convolutions are slower than they could be: our kernels can't run here ({trouble()})")

    def _architecture(self, client: int) -> str:
        return self.population.architectures[client].name

    def _stack(self, clients: list[int], round: int, downloads: Mapping[int, Message], *, keep: bool) -> stacked.Stack:
        """The clients' states after their downloads, stacked and padded with copies of the first client.

        `keep`: in tensors that stay, because captured steps work on them.
        """
        key = (self._architecture(clients[0]), self._size(clients))
        stack, held = self._stacks.get(key), self._held.pop(key, None)
        if stack is None or keep or held != self._versions(clients):
            states = [self.store.get(client) for client in clients]
            padded = states + states[:1] * (key[1] - len(states))
            if stack is None:
                stack = stacked.Stack.of(padded)
            else:
                stacked.copy_states(stack.parts, padded)
            if keep:
                self._stacks[key] = stack
        receive_all(self.population, clients, stack.parts[: len(clients)], downloads, round)
        return stack

    def _versions(self, clients: list[int]) -> list[tuple[int, int]]:
        """Which clients these are, and which of their states."""
        return [(client, self.store.version(client)) for client in clients]

    def _own(self, clients: list[int], stack: stacked.Stack) -> State:
        """The clients' part of their stack, and the numbers that differ between them."""
        state = {name: tensor[: len(clients)] for name, tensor in stack.state.items()}
        return state | self.population.numbers(clients)

    def _size(self, clients: list[int]) -> int:
        """The size a cohort is padded to, so that few different shapes occur over many rounds."""
        count = len(clients)
        if self.population.device.type != "cuda":
            return count
        if count == self._owners[self._architecture(clients[0])]:
            return count
        return stepped(count, SIZES)

    def _width(self, client: int) -> int:
        """Samples in a batch: no more than any client of the architecture has."""
        return min(self.population.training.batch_size, self._longest[self._architecture(client)])

    def _captured(self, client: int, state: State, phase: Phase) -> CapturedStep:
        name = self._architecture(client)
        key = (name, len(next(iter(state.values()))), phase.name)
        if key in self._steps and not same(self._steps[key].step.phase, phase):  # it may change between rounds
            self._drop_steps([key])
        if key not in self._steps:
            exact = self._trial.of(client).exact(key[1], phase)
            numbers = self.population.numbers([client] * key[1])
            step = stacked.PhaseStep(self.population, self._network(client), phase, state, exact=exact, numbers=numbers)
            most = phase.epochs * -(-self._longest[name] // self._width(client))
            self._steps[key] = CapturedStep(step, self._stream(client), most)
        self._steps.move_to_end(key)
        return self._steps[key]

    def _drop_old_steps(self) -> None:
        """Drop the steps that are not kept; only while no cohort trains, because one may be queueing the oldest."""
        self._drop_steps(list(self._steps)[:-KEPT_STEPS])

    def _drop_steps(self, keys: Iterable[tuple[str, int, str]]) -> None:
        """Drop these steps, after waiting for the GPU if there are graphs of them: none may be freed while it runs."""
        dropped = [self._steps.pop(key) for key in keys]
        if any(step.captured for step in dropped):
            finish_gpu_work()

    def _stream(self, client: int) -> Stream:
        name = self._architecture(client) if self._apart else "all"
        if name not in self._streams:
            self._streams[name] = Stream(self.population.device)
        return self._streams[name]

    def _graphs(self, client: int, stack: stacked.Stack) -> CohortReplays | None:
        """Where passes of a cohort are captured: on a GPU, if its stack is one that stays."""
        name, stream = self._architecture(client), self._stream(client)
        if stream.cuda is None or self._stacks.get((name, len(stack.parts))) is not stack:
            return None
        return CohortReplays(self._replays, name, stack.state, stream)

    def _network(self, client: int) -> ClientNetwork:
        """The architecture's network, around which states are laid; phases set its modules' modes."""
        with self._building:
            return self._build(client)

    def _quiet_network(self, client: int) -> ClientNetwork:
        """The same in evaluation mode, in which it usually is: setting it takes longer than looking."""
        network = self._network(client)
        return network.eval() if any(module.training for module in network.modules()) else network

    def _let_go(self) -> None:
        """Free all memory that is only kept to be faster next time."""
        if self.population.device.type == "cuda":
            finish_gpu_work()  # no graph may be freed while it runs
        self._steps.clear()
        self._replays.clear()
        self._tables.clear()
        self._stacks.clear()
        self._held.clear()
        self._streams.clear()
        gc.collect()  # a failed capture may have left cycles that hold on to its memory
        if self.population.device.type == "cuda":
            free_gpu_memory()
