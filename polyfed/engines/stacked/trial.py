"""Whether the clients of an architecture can be stacked: found out once, by trying, before they first train.

What can't be stacked is trained by the plain loop. Where batch norm can't know which samples are padding, each client
is its own cohort. Both are noted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from polyfed.compute import without_search
from polyfed.engines import stacked
from polyfed.engines.stacked.plan import new_plan
from polyfed.message import State
from polyfed.methods.base import Phase
from polyfed.methods.parts.network import ClientNetwork
from polyfed.population import Population

CHECKED = 8
"""Samples with which dropout masks are checked: batch norm of fewer has gradients that are mostly rounding."""
FEW = 3
"""Samples with which padding is checked where there is no batch norm."""


@dataclass
class Finding:
    """How the clients of one architecture can train."""

    normed: set[str]
    """The phases in which batch norm trains."""
    single: bool = False
    """Each client is its own cohort, because its batch norm can't tell what is padding."""
    reason: str | None = None
    """Why the plain loop trains them; None: they are stacked."""

    def exact(self, size: int, phase: Phase) -> bool:
        """Whether nothing is padded in a phase of a cohort: a single client has PyTorch's own batch norm."""
        return size == 1 and phase.name in self.normed


class Trial:
    """Tries every architecture once, when one of its clients is first asked about."""

    def __init__(
        self,
        population: Population,
        network: Callable[[int], ClientNetwork],
        state: Callable[[int], State],
        width: Callable[[int], int],
        note: Callable[[str], None],
    ) -> None:
        """`network`, `state` and `width` (samples in a batch) are those of a client; `note` tells the user."""
        self._population, self._network, self._state, self._width = population, network, state, width
        self._note = note
        self._found: dict[str, Finding] = {}

    def of(self, client: int) -> Finding:
        """What is known about the client's architecture."""
        name = self._population.architectures[client].name
        if name not in self._found:
            network = self._network(client)
            found = Finding(stacked.normed_phases(network, self._population.method.phases()))
            self._found[name] = found
            found.reason = self._draws(name) or stacked.unstackable(network) or self._try(client, name, found)
            if found.reason:
                self._note(f"clients with {name} train one after another: {found.reason}")
        return self._found[name]

    def known(self, client: int) -> Finding | None:
        """The same without trying anything: None if the architecture has not been tried yet."""
        return self._found.get(self._population.architectures[client].name)

    def _draws(self, name: str) -> str | None:
        return "it draws from a global generator, which is seeded for each" if name in self._population.draws else None

    @without_search()
    def _try(self, client: int, name: str, found: Finding) -> str | None:
        """What goes wrong with two copies of the client, if anything.

        If batch norm can't tell what is padding, tries again without padding.
        """
        network = self._network(client)
        state = {name: torch.stack([tensor, tensor]) for name, tensor in self._state(client).items()}
        try:
            self._work(client, network, state, found)
        except torch.OutOfMemoryError:
            raise
        except stacked.OtherRows as error:
            found.single = True
            self._note(f"clients with {name} train one after another because of batch norm: {error}")
            return self._try(client, name, found)
        except Exception as error:  # the plain loop may succeed, and says what is wrong if not
            return " ".join(str(error).split())[:200]
        return None

    def _work(self, client: int, network: ClientNetwork, state: State, found: Finding) -> None:
        """Train, predict and collect with two copies of the client.

        `vmap` is used even where clients train alone: it refuses what can't be captured, such as decisions about
        values.
        """
        people, twice = self._population, [client, client]
        width, alone = self._width(client), found.single
        few = min(2, width) if found.normed else width  # two large networks may not fit into memory
        numbers = people.numbers(twice)
        for phase in people.method.phases():
            plan = new_plan(people, twice, few, 2, phase, 0)
            if plan.active:
                step = stacked.PhaseStep(people, network, phase, state, exact=alone, numbers=numbers)
                step.bf16 &= not alone  # `vmap` has no batch norm in bfloat16
                inputs = plan.on(people.device).at(0)
                step.prepare(inputs)
                if step.masks.calls and not alone:
                    several = new_plan(people, twice, min(CHECKED, width), 2, phase, 0)
                    step.check_masks(several.on(people.device).at(0))
                step(inputs | step.masks.draw((), (), few))
                if not alone and not people.is_ours(client):
                    count, tolerance = (CHECKED, 0.05) if phase.name in found.normed else (FEW, 1e-3)
                    others = new_plan(people, twice, min(count, width), 2, phase, 0)
                    step.check_padding(others.on(people.device).at(0), tolerance)
        network.eval()
        state |= numbers
        with torch.no_grad():
            stacked.own_rules(people, twice, network, state)
            stacked.collect(people, twice, network, state)
            stacked.inspect(people, twice, network, state)
            stacked.probe(people, twice, network, state, 0)
