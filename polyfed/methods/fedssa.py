"""FedSSA: clients share the rows of their heads for the classes they have (Yi et al., IJCAI 2024)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from polyfed.compute import to_device
from polyfed.errors import InputError
from polyfed.message import Floats, Message, Schema, State
from polyfed.methods.base import Knowledge, Method, Reply, Server, Task, Trained, Training
from polyfed.methods.parts.tools import (
    ClassVectors,
    class_vectors_schema,
    mean_by_class,
    rows_of_all,
    store_vectors,
)

GROWTH_WARNING = 10
"""Stabilisation beyond this round, or rows that can grow beyond this factor: a run should say so."""

DECAYS: dict[str, Callable[[int, int], float]] = {
    "cosine": lambda round, stable: math.cos(math.pi * round / (2 * stable)),
    "linear": lambda round, stable: 1 - round / stable,
    "exponential": lambda round, stable: 0.01 ** (round / stable),
    "constant": lambda round, stable: 1.0,
}
"""What is left of the first share in a round before the stable one."""


class FedSSA(Method):
    """A class's row of the head (its weights and its bias) is averaged over the clients that have the class.

    Rows of classes that a client does not have stay as they are, in both directions.
    """

    name = "fedssa"
    title = "FedSSA"
    paper = "Yi et al., IJCAI 2024"
    sends = "the head's rows of seen classes"
    reveals = "Which classes a client holds, because only their rows of the head are sent."
    depends_on_rounds = True
    requires = ("features", "head")
    announces_classes = True
    receives = ("model.head",)
    grid = {"history": (0.1, 0.3, 0.5, 0.7, 0.9, 1.0), "stable_round": (2, 4, 10, 20, 45)}

    class Config(Method.Config):
        history: float = Field(
            0.5, ge=0, le=1, description="how much of its own last rows a client adds initially (the paper's mu_0)"
        )
        stable_round: int = Field(
            4, ge=1, description="the round from which it adds nothing (the paper's T_stable); 1 or 2: it never does"
        )
        decay: Literal["cosine", "linear", "exponential", "constant"] = Field(
            "cosine", description="how that weight falls until then; exponential: to a hundredth, constant: not at all"
        )
        convex: bool = Field(
            False, description="mix own and global rows with weights that sum to one, so that rows do not grow"
        )
        holders: Literal["all", "participants"] = Field(
            "all", description="a global row is the mean over all clients that ever sent it, or over this round's only"
        )
        full_header: bool = Field(
            False, description="send whole heads with zeros for other classes, so that no list of classes travels"
        )
        average: Literal["classes", "head"] = Field(
            "classes",
            description="average a class's row over the clients that have the class, or (an ablation) all rows over "
            "all clients",
        )

        @model_validator(mode="after")
        def _hides_what_it_can(self) -> Self:
            if self.full_header and self.average == "head":
                raise InputError(
                    "fedssa's full_header sends zeros for classes that a client does not have, but with average=head "
                    "all rows count: leave out one of the two."
                )
            return self

    config: Config

    def __init__(self, config: Config, task: Task, training: Training) -> None:
        super().__init__(config, task, training)
        head = task.new_head()
        if task.architecture is not None:
            _check_rows(head, task.architecture.name)
        self.row_size = head_rows({f"model.head.{name}": t for name, t in head.state_dict().items()}).shape[1]
        self.whole = config.full_header or config.average == "head"
        """Whether heads travel, not rows with a list of classes."""
        self.announces_classes = not self.whole

    # The client's side -----------------------------------------------------------------------------------------------

    def receive(self, state: Mapping[str, Tensor], message: Message, client: Knowledge) -> State:
        if not message.tensors:
            return {}
        rows = head_rows(state)
        labels, received = sent_rows(message)
        if self.config.average == "classes":
            own = torch.isin(labels, client.classes.to(labels.device))
            labels, received = labels[own], received[own]
        # Eq. 4 of the paper. A class without a global row is not in the message: its local row stays.
        share = self.own_share(client.round)
        rows[labels] = (1 - share if self.config.convex else 1) * received + share * rows[labels]
        return split_rows(state, rows)

    def receive_all(
        self, states: Sequence[Mapping[str, Tensor]], messages: Sequence[Message], clients: Sequence[Knowledge]
    ) -> list[State] | None:
        if type(self).receive is not FedSSA.receive or self.whole:
            return None
        sent = [place for place, message in enumerate(messages) if message.tensors]
        if not sent:
            return [{} for _ in messages]
        places = rows_of_all([messages[place].metadata["labels"] for place in sent])
        rows = torch.stack([head_rows(states[place]) for place in sent])
        received, before = torch.cat([messages[place].tensors["rows"] for place in sent]), rows[places]
        held = to_device(torch.stack([clients[place].counts for place in sent]) > 0, rows.device)[places]
        share = self.own_share(clients[0].round)
        mixed = (1 - share if self.config.convex else 1) * received + share * before
        # Without asking which rows are a client's own: whoever asks waits for a GPU.
        rows.index_put_(places, torch.where(held[:, None], mixed, before))
        changed: list[State] = [{} for _ in messages]
        for place, own in zip(sent, rows, strict=True):
            changed[place] = split_rows(states[place], own)
        return changed

    def own_share(self, round: int) -> float:
        """The weight of a client's own rows in a round (the paper's mu^t); rounds count from 1."""
        stable = self.config.stable_round
        return self.config.history * DECAYS[self.config.decay](round, stable) if round < stable else 0.0

    def upload(self, client: Trained) -> Message:
        rows, seen = head_rows(client.state), client.counts > 0
        if self.config.average == "head":
            return Message({"head": rows})
        if self.config.full_header:
            return Message({"head": torch.where(seen.to(rows.device)[:, None], rows, 0.0)})
        return Message({"rows": rows[client.classes.to(rows.device)]}, {"labels": client.classes})

    # The server's side -----------------------------------------------------------------------------------------------

    def start(self, server: Server) -> None:
        empty = ClassVectors(self.task.classes, self.row_size)
        server.state.update({f"rows.{name}": tensor for name, tensor in empty.state_dict().items()})

    def download(self, server: Server, client: int, classes: Tensor | None) -> Message:
        rows, known = server.state["rows.vectors"], server.state["rows.known"]
        if self.whole:
            return Message({"head": rows}) if bool(known.any()) else Message()
        assert classes is not None
        labels = classes[known[classes]]
        return Message({"rows": rows[labels]}, {"labels": labels}) if len(labels) else Message()

    def schema(self) -> Schema:
        if self.whole:
            return Schema({"head": Floats((self.task.classes, self.row_size))})
        return class_vectors_schema("rows", self.task.classes, self.row_size)

    def aggregate(self, server: Server, replies: Sequence[Reply]) -> None:
        if server.round == 1:
            server.notes.extend(self.growth_note())
        sent = {reply.client: sent_rows(reply.message) for reply in replies}
        if self.config.holders == "all":
            for client, (labels, rows) in sent.items():
                server.state |= {f"client.{client}.labels": labels, f"client.{client}.rows": rows}
            sent = latest_rows(server.state)
        # Eq. 3 of the paper: a plain mean over the holders. A class that none of them sent keeps its last row.
        labels = torch.cat([labels for labels, _ in sent.values()])
        rows = torch.cat([rows for _, rows in sent.values()])
        means, seen = mean_by_class(rows, labels, torch.ones(len(labels)), self.task.classes)
        server.state.update(store_vectors(server.state, "rows", means, seen))

    def growth_note(self) -> list[str]:
        """The paper's sum is no mean: a warning where it can let rows grow far."""
        growth = math.prod(1 + self.own_share(round) for round in range(2, self.task.rounds + 1))
        if self.config.convex or growth == 1 or max(self.config.stable_round, growth) <= GROWTH_WARNING:
            return []
        return [
            f"with stable_round {self.config.stable_round} the head's rows can grow {growth:.3g}-fold before they are "
            "stable; convex=true keeps their size"
        ]


def _check_rows(head: nn.Module, network: str) -> None:
    """Raise unless all rows of a network's head can be shared."""
    if not isinstance(head, nn.Linear) or is_parametrized(head):  # whose weight is computed, as with a weight norm
        raise InputError(
            f"fedssa needs a head that is one linear layer, with one row for each class, but that of {network} is of "
            f"type {type(head).__name__}; choose networks that end with one."
        )
    if not all(parameter.requires_grad for parameter in head.parameters()):
        raise InputError(
            f"fedssa shares whole rows of the head, but parts of that of {network} are frozen: leave its parameters "
            "trainable (requires_grad=True)."
        )


def head_rows(state: Mapping[str, Tensor]) -> Tensor:
    """A linear head as one row per class, a new tensor [classes, features]; the bias, if any, is its last column."""
    weight, bias = state["model.head.weight"], state.get("model.head.bias")
    return weight.clone() if bias is None else torch.cat([weight, bias[:, None]], dim=1)


def split_rows(state: Mapping[str, Tensor], rows: Tensor) -> State:
    """The head's entries of a client's state that hold these rows."""
    if "model.head.bias" not in state:
        return {"model.head.weight": rows}
    return {"model.head.weight": rows[:, :-1], "model.head.bias": rows[:, -1]}


def sent_rows(message: Message) -> tuple[Tensor, Tensor]:
    """The classes whose rows a message carries, and these rows; of a full head, those that are not zero."""
    if "rows" in message.tensors:
        return message.metadata["labels"], message.tensors["rows"]
    head = message.tensors["head"]
    labels = (head != 0).any(dim=1).nonzero().flatten()
    return labels, head[labels]


def latest_rows(state: Mapping[str, Tensor]) -> dict[int, tuple[Tensor, Tensor]]:
    """What the server keeps of every client that has ever answered, in the order of client numbers."""
    numbers = sorted(int(name.split(".")[1]) for name in state if name.endswith(".labels"))
    return {number: (state[f"client.{number}.labels"], state[f"client.{number}.rows"]) for number in numbers}
