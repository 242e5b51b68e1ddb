"""What a method is: the losses it minimises and the messages it exchanges, and nothing else.

A method never loops over batches, moves tensors between devices, opens a file or a socket: an engine does that. Three
rules let the same code run in a plain loop, for many clients at once and between organisations:

1. A loss is a pure function of (network, batch) and returns one value per sample. What was received is part of the
   network: `receive` writes it into the client's state.
2. All state is named tensors, flat: `model.head.weight`, `proxy.0.bias`, `prototypes.vectors`.
3. Random draws come only from the generators passed in (`draw`, `Trained.generator`, `server.generator`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor, nn

from polyfed.errors import InputError
from polyfed.evaluation import Score
from polyfed.message import Message, Schema, State
from polyfed.methods.parts.network import Applied, Batch, ClientNetwork
from polyfed.methods.parts.statistics import ClassStatistics
from polyfed.methods.parts.task import Task, Training
from polyfed.methods.parts.tools import cross_entropy
from polyfed.models import SplitNetwork
from polyfed.seeds import torch_generator
from polyfed.server.kept import Kept
from polyfed.settings import Settings

__all__ = [
    "Applied",
    "Batch",
    "ClientNetwork",
    "Collect",
    "Common",
    "Knowledge",
    "Message",
    "MessageStep",
    "Method",
    "Phase",
    "Probe",
    "Reply",
    "Schema",
    "Server",
    "SplitNetwork",
    "State",
    "Task",
    "Trained",
    "Training",
]

MessageStep: TypeAlias = Callable[[Message, int, int], Message]
"""Changes an upload before it leaves: from (message, round, client) to the message that is sent."""
Loss: TypeAlias = Callable[[ClientNetwork, Batch], Tensor | tuple[Tensor, Tensor]]
Common: TypeAlias = Literal["features", "head", "network"]
Part: TypeAlias = tuple[float, float]
"""Where a part of a client's (once shuffled) training samples starts and ends, as shares of all."""


@dataclass(frozen=True)
class Phase:
    """One stage of local training: some modules are trained, all others are frozen and in evaluation mode."""

    name: str
    trains: tuple[str, ...]
    """Names of modules, such as `model`, `model.head` or `proxy`."""
    loss: Loss
    """One value per sample; or a pair (values, vectors per sample), and the engine averages the vectors per class over
    all visited samples into `Trained.tracked`."""
    epochs: int
    lr: float | None = None
    """Overrides the training's learning rate."""
    views: Literal[0, 2] = 0
    """2: the batch also carries two augmented views of each image, in `batch.views`; `batch.x` stays as it is."""
    draw: Callable[[torch.Generator, int], State] | None = None
    """Extra random tensors for that many samples, one row each, passed to the loss batch by batch as `batch.drawn`."""
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Parameters that are clamped to a range after every step."""
    unclipped: tuple[str, ...] = ()
    """Those of its modules whose gradients `training.clip` does not limit."""
    part: Part = (0.0, 1.0)
    """Which part of the client's (once shuffled) training samples this phase sees."""
    augment: bool = True
    """False: this phase sees images as they are, even if training augments."""
    first_round: int = 0
    """Rounds are numbered from 1; before this one the phase is skipped, and what it trains does not change."""

    def __post_init__(self) -> None:
        for module in self.unclipped:
            if module not in self.trains:
                known = ", ".join(self.trains)
                raise InputError(
                    f"phase '{self.name}' leaves '{module}' unclipped, but trains {known}: name one of these."
                )

    @property
    def clipped(self) -> tuple[str, ...]:
        """Its modules whose gradients are limited, each by itself."""
        return tuple(module for module in self.trains if module not in self.unclipped)

    def edges(self, samples: int) -> tuple[int, int]:
        """Where this phase's part starts and ends among this many samples."""
        return edges(self.part, samples)


def edges(part: Part, samples: int) -> tuple[int, int]:
    """Where a part starts and ends among this many samples; neighbouring parts share an edge."""
    return round(samples * part[0]), round(samples * part[1])


@dataclass(frozen=True)
class Collect:
    """A pass over the training samples after training, in evaluation mode, that gathers statistics per class."""

    of: Callable[[ClientNetwork, Tensor], Tensor] = field(default=lambda net, x: net.features(x))
    covariance: bool = False


@dataclass(frozen=True)
class Probe:
    """A question to a trained client about two small batches of its samples; asking it changes nothing.

    The study batch is drawn anew in every round; the quiz batch is always the same, the first samples of its part.
    """

    of: Callable[[ClientNetwork, State, Batch, Batch], State]
    """From (network, parameters, study, quiz) to named tensors of fixed shapes, which `upload` finds in
    `Trained.probed`. Pure like a loss, in evaluation mode; a batch may be padded, so use its `mask`. Derivatives by
    `torch.func.grad` and `torch.func.jvp` only, of `Applied(net, function).on(parameters)`."""
    study: Part
    quiz: Part
    batch: int
    """The largest number of samples in each of the two batches; a client that can't fill both at all is not asked."""
    trains: tuple[str, ...] = ("model",)
    """Names of modules: their parameters, without those that the user froze, are what `of` is given."""

    def sizes(self, samples: int) -> tuple[int, int]:
        """How many study and quiz samples a client has of this many; (0, 0) if it is not asked."""
        ends = [edges(part, samples) for part in (self.study, self.quiz)]
        study, quiz = (min(self.batch, stop - start) for start, stop in ends)
        return (study, quiz) if study and quiz else (0, 0)


@dataclass(frozen=True)
class Knowledge:
    """What a client knows about its own data, and the round."""

    counts: Tensor
    """Training samples per class, int64 [classes]."""
    round: int

    @property
    def samples(self) -> int:
        return int(self.counts.sum())

    @property
    def classes(self) -> Tensor:
        """The classes with training samples, in ascending order."""
        return self.counts.nonzero().flatten()


@dataclass(frozen=True)
class Trained(Knowledge):
    """A client after local training, as `upload` sees it."""

    state: Mapping[str, Tensor] = field(default_factory=dict)
    statistics: ClassStatistics | None = None
    tracked: ClassStatistics | None = None
    probed: State | None = None
    """What the method's probe found; none if it has none, or the client has too few samples."""
    generator: torch.Generator | None = field(default=None, kw_only=True)
    """Random draws of the client for this round's upload, on the CPU; every engine passes it."""

    @property
    def sample_count(self) -> dict[str, Tensor]:
        """Metadata for a mean weighted by samples."""
        return {"samples": torch.tensor([self.samples])}


@dataclass(frozen=True)
class Reply:
    """What came back from one client: its message and what the engine observed."""

    client: int
    message: Message
    loss: float = float("nan")
    """Mean training loss of the first phase that trains the private model."""
    flops: int = 0
    notes: tuple[str, ...] = ()
    """Remarks of the method or the engine, kept as events of the run."""
    failure: str = ""
    """Why there is no message; such a reply is left out of the round."""
    evaluation: Score | None = None
    """How well the client predicts now, if that was asked for and saves a message."""


@dataclass
class Server:
    """The server's side of a run: named tensors, and networks that only the server trains."""

    seed: int
    device: torch.device = torch.device("cpu")
    """Where heavy work may be done; the state and all messages but their `heavy` tensors are on the CPU."""
    round: int = 0
    state: State = field(default_factory=dict)
    modules: nn.ModuleDict = field(default_factory=nn.ModuleDict)
    notes: list[str] = field(default_factory=list)
    kept: Kept = field(default_factory=Kept, repr=False, compare=False)
    """Captured steps of its training on a GPU, for later rounds; no part of what is saved."""
    common: State = field(default_factory=dict, repr=False, compare=False)
    """What downloads have in common until the next `aggregate`, made there once for all clients; not saved either."""

    def named_state(self) -> State:
        """All that the server remembers, as flat named tensors."""
        state: State = {f"state.{name}": tensor for name, tensor in self.state.items()}
        return state | {f"modules.{name}": tensor for name, tensor in self.modules.state_dict().items()}

    def load(self, named: Mapping[str, Tensor]) -> None:
        """Load what `named_state` gave; raises a `RuntimeError` if it belongs to another method."""
        missing = self.named_state().keys() - named.keys()
        if missing:
            raise RuntimeError(f"'{min(missing)}' is missing")
        modules = {name: tensor for name, tensor in named.items() if name.startswith("modules.")}
        self.common = {}
        self.modules.load_state_dict({name.removeprefix("modules."): tensor for name, tensor in modules.items()})
        self.state = {name.removeprefix("state."): tensor for name, tensor in named.items() if name not in modules}

    def generator(self, purpose: str) -> torch.Generator:
        """Random draws of this round for one purpose."""
        return torch_generator(self.seed, "server", purpose, self.round)


class Method:
    """A federated method. Subclasses override what their paper says and leave the rest.

    The order of a round: `download` (server) → `receive` (client) → `phases` (client) → `upload` (client) →
    `schema().check` (server) → `aggregate` (server). `predict` is how a client uses what it has learned.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    paper: ClassVar[str]
    sends: ClassVar[str]
    """What leaves a client, in a few words."""
    reveals: ClassVar[str] = ""
    """What such a message tells the server about a client's data, in plain words; empty: the method does not say."""
    requires: tuple[Common, ...] = ()
    """What clients must have in common."""
    announces_classes: bool = False
    """Clients tell the server which classes they hold when they join, because `download` depends on it."""
    predicts_after_training: bool = False
    """A client predicts with what its training makes of a download, so it can't be scored right after one."""
    collect: Collect | None = None
    probe: Probe | None = None
    depends_on_rounds: bool = False
    """What happens in a round depends on the total number of rounds."""
    kept_fresh: ClassVar[tuple[str, ...]] = ()
    """Modules beside the model that only hold what the server knows; `receive` changes nothing else.

    A client that does not take part in a round is scored as if it had received that round's download, like the
    participants. After a run, predictions use the server's final state.
    """
    receives: ClassVar[tuple[str, ...] | None] = None
    """Modules, or single entries of a client's state, that a download may change; None: any.

    A site protects the rest from its server. Without it, `kept_fresh` counts where it names modules.
    """
    grid: ClassVar[Mapping[str, Sequence[object]]] = {}
    """Values of its options that are worth trying, in ascending order: what its paper searched, or ours."""
    heavy: ClassVar[tuple[str, ...]] = ()
    """Uploaded tensors that a simulation leaves on the GPU, because the server works on them there."""
    uploads_in_threads: ClassVar[bool] = False
    """Whether an upload keeps a core of the CPU busy for long, so that a simulation makes several at once, in threads.

    Then `upload`, also a subclass's, must be safe to call from several threads.
    """

    class Config(Settings):
        """The method's options; a method with options overrides this with a subclass."""

    def __init__(self, config: Config, task: Task, training: Training) -> None:
        self.config = config
        self.task = task
        self.training = training

    @classmethod
    def needs(cls, config: Config) -> tuple[Common, ...]:
        """What clients must have in common with these options."""
        return cls.requires

    def misses(self, samples: int) -> str:
        """What a client with so few training samples does not do, as a note for the run; empty if it does all."""
        return ""

    # The client's side -----------------------------------------------------------------------------------------------

    def client_modules(self, model: SplitNetwork) -> dict[str, nn.Module]:
        """Modules that every client owns beside its private model; their state is personal until it is sent."""
        return {}

    def receive(self, state: Mapping[str, Tensor], message: Message, client: Knowledge) -> State:
        """The entries of the client's state that a download changes; by default those of the same names."""
        return dict(message.tensors)

    def receive_all(
        self, states: Sequence[Mapping[str, Tensor]], messages: Sequence[Message], clients: Sequence[Knowledge]
    ) -> list[State] | None:
        """What `receive` gives for each of several clients of one architecture, by operations on all of them at once.

        They may belong to different runs with the same settings. None: `receive` is called for each, as it also is in
        a subclass with a `receive` of its own.
        """
        return None

    @property
    def receivable(self) -> tuple[str, ...] | None:
        """What a download may change; None: any entry of a client's state."""
        return self.receives if self.receives is not None else self.kept_fresh or None

    def refreshed(self, state: Mapping[str, Tensor], message: Message, client: Knowledge) -> State:
        """The client's state after one more download, as far as it holds nothing but the server's knowledge."""
        changed = self.receive(state, message, client) if self.kept_fresh else {}
        fresh = {name: tensor for name, tensor in changed.items() if name.split(".")[0] in self.kept_fresh}
        return {**state, **fresh}

    def phases(self) -> list[Phase]:
        """The stages of local training, the same in every round; by default the private model on cross entropy."""
        return [Phase("model", trains=("model",), loss=self.loss, epochs=self.training.epochs)]

    def phases_in(self, round: int) -> list[Phase]:
        """The phases of a round: those that have begun. A subclass may leave out more, or change losses and numbers.

        What a phase trains stays the same; what it costs is counted with the loss that `phases` gives.
        """
        return [phase for phase in self.phases() if phase.first_round <= round]

    def loss(self, net: ClientNetwork, batch: Batch) -> Tensor:
        """The loss of the default phase, per sample."""
        return cross_entropy(net(batch.x), batch.y)

    def upload(self, client: Trained) -> Message:
        """What leaves the client after training."""
        return Message()

    def predict(self, net: ClientNetwork, x: Tensor) -> dict[str, Tensor]:
        """Scores [batch, classes] by each of the method's rules of prediction; the first is the method's own."""
        return {"classifier": net(x)}

    def inspect(self, net: ClientNetwork, batch: Batch) -> dict[str, Tensor]:
        """Possible remarks on a trained client, from one batch of its data; those that are true become events.

        Pure like a loss, in evaluation mode.
        """
        return {}

    # The server's side -----------------------------------------------------------------------------------------------

    def start(self, server: Server) -> None:
        """Give the server its initial state and networks."""

    def download(self, server: Server, client: int, classes: Tensor | None) -> Message:
        """What a client receives at the start of a round; `classes` is None unless `announces_classes`."""
        return Message()

    def schema(self) -> Schema:
        """What an upload must look like to be fused; the same in every round."""
        return Schema()

    def check(self, message: Message) -> None:
        """Raise `BadMessage` for an upload that must not be fused."""
        self.agreed_schema.check(message)

    def certain(self, messages: Sequence[Message]) -> Sequence[bool]:
        """For each of these uploads, whether `check` would certainly pass it; all others are checked one by one.

        Looking at all of them at once takes hardly longer than looking at one, all the more on a GPU. By default one
        that is not sound leaves nothing certain.
        """
        known = type(self).check is Method.check  # one of its own may refuse more
        return [known and self.agreed_schema.passes(messages)] * len(messages)

    def sized(self, message: Message) -> Mapping[str, Tensor]:
        """The tensors whose largest values are compared with what is usual; by default all that an upload carries."""
        return message.tensors

    @cached_property
    def agreed_schema(self) -> Schema:
        """`schema()`, made once: every reply is checked against it, and making it may mean building a network."""
        return self.schema()

    def forget(self, server: Server, clients: Iterable[int]) -> None:
        """Drop what the server assumes about these clients' states: their replies failed, or their states are lost."""

    def aggregate(self, server: Server, replies: Sequence[Reply]) -> None:
        """Fuse the checked replies, in the order of client numbers, into the server's state."""
