"""DC-PFL: a global head, calibrated on features drawn from pooled class Gaussians (Tang et al., IJCAI 2024)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from pydantic import Field
from torch import Tensor, nn

from polyfed.compute import beside, message_budget
from polyfed.errors import BadMessage, InputError
from polyfed.message import Floats, Message, Schema, State
from polyfed.methods.base import (
    Batch,
    ClientNetwork,
    Collect,
    Knowledge,
    Method,
    Reply,
    Server,
    SplitNetwork,
    Task,
    Trained,
    Training,
)  # fmt: skip
from polyfed.methods.parts.gaussians import (
    Gaussians,
    Noise,
    NoiseAhead,
    Wanted,
    diagonals,
    draw,
    in_proportion,
    pack,
    possible,
    possible_each,
)
from polyfed.methods.parts.tools import (
    ClassVectors,
    class_vectors_schema,
    cross_entropy,
    known_vectors,
    mean_by_class,
    module_state,
    part_of,
    store_vectors,
)
from polyfed.server.training import check_finite, take_steps, train_on_vectors


class DCPFL(Method):
    """Clients send the mean and covariance of each class's features; they get a calibrated head and global means."""

    name = "dc-pfl"
    title = "DC-PFL"
    paper = "Tang et al., IJCAI 2024"
    sends = "means and covariances of features per class, and class counts"
    reveals = (
        "How many training samples of each class a client holds, and how its features are spread. With few samples of "
        "a class this is close to the samples' own features."
    )
    requires = ("features", "head")
    heavy = ("covariances",)
    receives = ("model.head", "means")
    grid = {
        "weight": (0.01, 0.1, 1.0),
        "virtual_features": (600, 1000, 2000, 5000),
        "calibration_epochs": (1, 10, 100),
    }

    class Config(Method.Config):
        weight: float = Field(
            0.1, ge=0, description="weight of a feature's distance from its class's global mean; 0: without this term"
        )
        calibrate: bool = Field(
            True, description="train the head on virtual features too; false: no covariances are sent"
        )
        virtual_features: int = Field(1000, ge=1, description="virtual features drawn in a round")
        clip_virtual: bool = Field(False, description="set negative virtual features to zero, as after a ReLU")
        paper_eq11: bool = Field(False, description="pool covariances with the weights that the paper prints")
        server_lr: float = Field(0.01, gt=0, description="learning rate of the head on the server")
        means_steps: int = Field(1, ge=1, description="steps of the head on each participant's class means")
        calibration_epochs: int = Field(1, ge=1, description="passes of the head over the virtual features")
        calibration_batch_size: int = Field(64, ge=1, description="virtual features per step")

    config: Config

    def __init__(self, config: Method.Config, task: Task, training: Training) -> None:
        super().__init__(config, task, training)
        self.collect = Collect(covariance=self.config.calibrate)

    @cached_property
    def _ahead(self) -> NoiseAhead:
        return NoiseAhead()

    def client_modules(self, model: SplitNetwork) -> dict[str, nn.Module]:
        _linear(model.head)
        return {"means": ClassVectors(self.task.classes, model.feature_size)}

    def receive(self, state: Mapping[str, Tensor], message: Message, client: Knowledge) -> State:
        changed = part_of(message.tensors, "model.head")
        if "means" in message.tensors:
            changed |= store_vectors(state, "means", message.tensors["means"], message.metadata["labels"])
        return changed

    def loss(self, net: ClientNetwork, batch: Batch) -> Tensor:
        # Eq. 4 of the paper. Eq. 3 is the plain norm, not its square; a class without a global mean has no such term.
        features = net.features(batch.x)
        away: Tensor = net.means.distance(features, batch.y)
        return cross_entropy(net.head(features), batch.y) + self.config.weight * away

    def upload(self, client: Trained) -> Message:
        assert client.statistics is not None
        own = client.statistics
        tensors = {"means": own.means}
        if own.covariances is not None:
            tensors["covariances"] = pack(own.covariances)
        return Message(tensors, {"labels": own.labels, "counts": own.counts})

    def start(self, server: Server) -> None:
        server.modules["head"] = _linear(self.task.new_head())
        empty = ClassVectors(self.task.classes, self.task.feature_size)
        server.state.update({f"means.{name}": tensor for name, tensor in empty.state_dict().items()})

    def download(self, server: Server, client: int, classes: Tensor | None) -> Message:
        means = known_vectors(server.state, "means") if self.config.weight else Message()
        return Message({**module_state("model.head", server.modules["head"]), **means.tensors}, means.metadata)

    def schema(self) -> Schema:
        size = self.task.feature_size
        schema = class_vectors_schema("means", self.task.classes, size, counts=True)
        covariances = {"covariances": Floats(("seen", size * (size + 1) // 2))} if self.config.calibrate else {}
        return Schema({**schema.tensors, **covariances}, schema.metadata)

    def check(self, message: Message) -> None:
        super().check(message)
        if not self.config.calibrate:
            return
        covariances, size = message.tensors["covariances"], self.task.feature_size
        if not possible(covariances, size):
            if bool((diagonals(covariances, size) < 0).any()):
                raise BadMessage("'covariances' holds a negative variance.")
            raise BadMessage("'covariances' holds a covariance that is larger than its two variances allow.")

    def certain(self, messages: Sequence[Message]) -> Sequence[bool]:
        if not self.config.calibrate or type(self).check is not DCPFL.check:
            return super().certain(messages)
        fits = [self._fits(message) for message in messages]
        triangles = [message.tensors["covariances"] for message, fit in zip(messages, fits, strict=True) if fit]
        found = iter(possible_each(triangles, self.task.feature_size))
        return [fit and next(found) for fit in fits]

    def _fits(self, message: Message) -> bool:
        """Whether a message is all right but for its covariances' values."""
        try:
            self.agreed_schema.check(message, unread=("covariances",))
        except BadMessage:
            return False
        return True

    def sized(self, message: Message) -> State:
        # Covariances by standard deviations, which are of the features' own scale; no other entry is larger.
        found = {"means": message.tensors["means"]}
        if self.config.calibrate:
            variances = diagonals(message.tensors["covariances"], self.task.feature_size)
            found["standard deviations"] = variances.sqrt()
        return found

    def aggregate(self, server: Server, replies: Sequence[Reply]) -> None:
        messages = [reply.message for reply in replies if len(reply.message.metadata["labels"])]
        if messages:
            with beside(server.device):
                self._fuse(server, messages)

    def _fuse(self, server: Server, messages: Sequence[Message]) -> None:
        config, head = self.config, server.modules["head"]
        labels, counts = (torch.cat([message.metadata[name] for message in messages]) for name in ("labels", "counts"))
        means = torch.cat([message.tensors["means"] for message in messages])
        noise = self._noise(server, labels, counts) if config.calibrate else None  # drawn while the head takes steps
        # Eqs. 8 and 9 of the paper: one client after another, all its classes in one step.
        own = torch.arange(len(labels)).split([len(message.metadata["labels"]) for message in messages])
        take_steps(head, means, labels, [rows for rows in own for _ in range(config.means_steps)], config.server_lr)
        # Eq. 10. A class that no participant holds keeps its last mean.
        pooled, seen = mean_by_class(means, labels, counts, self.task.classes)
        server.state.update(store_vectors(server.state, "means", pooled, seen))
        if noise is not None:
            sent, most = [message.tensors["covariances"] for message in messages], message_budget(server.device)
            fits = most is None or sum(each.nbytes for each in sent) <= most
            triangles = torch.cat([each.to(server.device if fits else "cpu") for each in sent])
            features, classes = self._virtual_features(Gaussians(labels, counts, means, triangles), noise)
            epochs, batch_size = config.calibration_epochs, config.calibration_batch_size
            # Eq. 12.
            generator = server.generator("calibration")
            train_on_vectors(
                head, features, classes, epochs=epochs, batch_size=batch_size, lr=config.server_lr, generator=generator,
                device=server.device, kept=server.kept, notes=server.notes,
            )  # fmt: skip
            if server.device.type == "cuda" and server.round < self.task.rounds:
                self._ahead.draw_next(server, noise.wanted)
        check_finite(head, "head", server.round, config.server_lr, [means])

    def _noise(self, server: Server, labels: Tensor, counts: Tensor) -> Noise:
        """Draws for features of every class that was sent, in proportion to its samples."""
        totals = torch.zeros(self.task.classes, dtype=torch.int64).index_add_(0, labels, counts)
        amounts = in_proportion(totals, self.config.virtual_features)
        wanted = Wanted.of(labels, counts, amounts, self.task.feature_size)
        return self._ahead.of(server, wanted, aside=server.device.type == "cuda")

    def _virtual_features(self, sent: Gaussians, noise: Noise) -> tuple[Tensor, Tensor]:
        """Features of the classes that were sent, made from these draws, and their classes."""
        features, classes = draw(sent, noise, paper_weights=self.config.paper_eq11)
        return features.clamp(min=0) if self.config.clip_virtual else features, classes


def _linear(head: nn.Module) -> nn.Linear:
    if not isinstance(head, nn.Linear):
        raise InputError(
            f"dc-pfl needs networks whose head is one linear layer, but this head is a {type(head).__name__}: "
            "choose networks that end with a single nn.Linear behind their features."
        )
    return head
