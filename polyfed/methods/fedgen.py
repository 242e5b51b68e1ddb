"""FedGen: the server trains a generator of features that teaches the clients (Zhu et al., ICML 2021)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from pydantic import Field
from torch import Tensor, nn

from polyfed.errors import BadMessage
from polyfed.message import Counts, Labels, Message, Schema, State
from polyfed.methods.base import Batch, ClientNetwork, Knowledge, Method, Phase, Reply, Server, SplitNetwork, Trained
from polyfed.methods.parts.distillation import kl_divergence
from polyfed.methods.parts.feature_generator import ClientGenerator, ServerGenerator, train_generator
from polyfed.methods.parts.tools import cross_entropy, module_state, part_of, same_shapes
from polyfed.server.training import check_finite

SMALLEST_WEIGHT = 1e-4


class FedGen(Method):
    """Heads are averaged; features generated for any class train them, and guide the client's own predictions."""

    name = "fedgen"
    title = "FedGen"
    paper = "Zhu et al., ICML 2021"
    sends = "the head and the number of samples of each class"
    reveals = "How many training samples of each class a client holds, in plain numbers, and its head."
    requires = ("head",)
    receives = ("model.head", "generator")
    grid = {"label_weight": (0.1, 1.0, 10.0), "guidance_weight": (0.1, 1.0, 10.0)}

    class Config(Method.Config):
        label_weight: float = Field(1.0, ge=0, description="initial weight of the loss on generated features")
        guidance_weight: float = Field(1.0, ge=0, description="initial weight of the guidance by generated features")
        decay: float = Field(
            0.98, gt=0, le=1, description="factor applied to both weights and the server's learning rate in each round"
        )
        noise: int = Field(32, ge=1, description="random numbers that a feature is generated from")
        hidden: int = Field(512, ge=1, description="hidden units of the generator")
        server_lr: float = Field(3e-4, gt=0, description="learning rate of the generator (Adam)")
        server_steps: int = Field(50, ge=1, description="training steps of the generator per round")
        server_batch: int = Field(32, ge=2, description="generated features per step on the server")

    config: Config

    def client_modules(self, model: SplitNetwork) -> dict[str, nn.Module]:
        sizes = (self.task.classes, model.feature_size, self.config.noise, self.config.hidden)
        return {"generator": ClientGenerator(*sizes)}

    def receive(self, state: Mapping[str, Tensor], message: Message, client: Knowledge) -> State:
        if "labels" not in message.metadata:
            return dict(message.tensors)
        known = torch.zeros_like(state["generator.known"])
        known.index_fill_(0, message.metadata["labels"], True)  # a value that is assigned lets a GPU be waited for
        return {**message.tensors, "generator.known": known, "generator.weights": self.weights(client.round)}

    def weights(self, round: int) -> Tensor:
        """The weights of the two terms that the generator adds to the loss in a round."""
        starts = (self.config.label_weight, self.config.guidance_weight)
        fading = self.config.decay ** (round - 1)
        return torch.tensor([max(start * fading, min(start, SMALLEST_WEIGHT)) for start in starts])

    def phases(self) -> list[Phase]:
        return [Phase("model", trains=("model",), loss=self.loss, epochs=self.training.epochs, draw=self.draw)]

    def draw(self, generator: torch.Generator, samples: int) -> State:
        """For each sample of a batch: noise for a feature of its class, and noise and a class for any other."""
        noise = torch.randn(2, samples, self.config.noise, generator=generator)
        return {"guiding": noise[0], "noise": noise[1], "chance": torch.rand(samples, generator=generator)}

    def loss(self, net: ClientNetwork, batch: Batch) -> Tensor:
        generator: ClientGenerator = net.generator
        # The generator's weights are zero until it has arrived.
        label_weight, guidance_weight = generator.weights
        logits = net(batch.x)
        labels = generator.choose(batch.drawn["chance"])
        generated = cross_entropy(net.head(generator(batch.drawn["noise"], labels)), labels)
        guide = net.head(generator(batch.drawn["guiding"], batch.y))
        # A class that nobody has told the server of yet gives no guidance.
        guidance = torch.where(generator.known[batch.y], kl_divergence(guide, logits), 0.0)
        values: Tensor = cross_entropy(logits, batch.y) + label_weight * generated + guidance_weight * guidance
        return values

    def upload(self, client: Trained) -> Message:
        # The server weights heads by their samples of a class; other clients only learn which classes there are.
        metadata = {"labels": client.classes, "counts": client.counts[client.classes]}
        head = part_of(client.state, "model.head")
        return Message({name: tensor for name, tensor in head.items() if name in self._head_state}, metadata)

    def start(self, server: Server) -> None:
        sizes = (self.task.classes, self.task.feature_size, self.config.noise, self.config.hidden)
        server.modules["generator"] = self.task.seeded_module(lambda: ServerGenerator(*sizes), "generator")
        server.state.update(self._head_state)
        server.state["known"] = torch.zeros(self.task.classes, dtype=torch.bool)

    def download(self, server: Server, client: int, classes: Tensor | None) -> Message:
        head = part_of(server.state, "model.head")
        known = server.state["known"].nonzero().flatten()
        if len(known) == 0:  # an untrained generator would only disturb
            return Message(head)
        return Message({**head, **(server.common or generator_of(server).for_clients())}, {"labels": known})

    def schema(self) -> Schema:
        return Schema(same_shapes(self._head_state), {"labels": Labels(self.task.classes), "counts": Counts(("seen",))})

    def check(self, message: Message) -> None:
        super().check(message)
        if message.metadata["labels"].numel() == 0:
            raise BadMessage("the message comes from a client without samples.")

    def aggregate(self, server: Server, replies: Sequence[Reply]) -> None:
        counts = torch.zeros(len(replies), self.task.classes, dtype=torch.float64)
        for row, reply in zip(counts, replies, strict=True):
            row[reply.message.metadata["labels"]] = reply.message.metadata["counts"].double()
        heads = {name: torch.stack([reply.message.tensors[name] for reply in replies]) for name in self._head_state}
        share = (counts.sum(1) / counts.sum()).float()
        server.state.update({name: torch.tensordot(share, stacked, dims=1) for name, stacked in heads.items()})
        server.state["known"] = server.state["known"] | (counts.sum(0) > 0)
        self._train_generator(server, heads, counts)

    def _train_generator(self, server: Server, heads: State, counts: Tensor) -> None:
        config, generator = self.config, generator_of(server).to(server.device)
        train_generator(
            generator,
            self._head,
            {name.removeprefix("model.head."): tensor for name, tensor in heads.items()},
            counts,
            steps=config.server_steps,
            batch_size=config.server_batch,
            lr=config.server_lr * config.decay ** (server.round - 1),
            random=server.generator("generator"),
            notes=server.notes,
            kept=server.kept,
        )
        check_finite(generator, "generator", server.round, config.server_lr, heads.values())
        server.common = generator.for_clients()

    @cached_property
    def _head(self) -> nn.Module:
        return self.task.new_head()

    @cached_property
    def _head_state(self) -> State:
        return module_state("model.head", self._head)


def generator_of(server: Server) -> ServerGenerator:
    """The server's generator, which lives on from round to round."""
    generator = server.modules["generator"]
    assert isinstance(generator, ServerGenerator)
    return generator
