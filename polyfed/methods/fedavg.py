"""FedAvg: the mean of all networks, for clients that have the same one (McMahan et al., AISTATS 2017)."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy

from pydantic import Field
from torch import Tensor, nn

from polyfed.message import Message, State
from polyfed.methods.base import Batch, ClientNetwork, Knowledge, Method, Phase, SplitNetwork, Task, Training
from polyfed.methods.parts.averaged import Averaged
from polyfed.methods.parts.tools import cross_entropy, module_state


class FedAvg(Averaged):
    """Clients train the global network on their data; the server averages the results, weighted by samples.

    With fine-tuning a client trains the global network twice, each time from what it received: `travelling` is trained
    as ever and sent, `model` is fine-tuned and kept. So the global network is the same, however long clients fine-tune.
    """

    name = "fedavg"
    title = "FedAvg"
    paper = "McMahan et al., AISTATS 2017"
    sends = "the whole network"
    reveals = (
        "Next to what the server sent, these weights are an update from which images and labels can in part be "
        "reconstructed. The number of training samples is sent too."
    )
    requires = ("network",)
    module = "model"
    receives = ("model", "travelling")
    grid = {"finetune_epochs": (0, 1, 5)}

    class Config(Method.Config):
        finetune_epochs: int = Field(
            0, ge=0, description="epochs for which a client fine-tunes the global network for itself; 0: it does not"
        )

    config: Config

    def __init__(self, config: Config, task: Task, training: Training) -> None:
        super().__init__(config, task, training)
        self.predicts_after_training = config.finetune_epochs > 0

    def first_state(self) -> State:
        return module_state(self.module, self.task.new_model())

    def client_modules(self, model: SplitNetwork) -> dict[str, nn.Module]:
        return {"travelling": deepcopy(model)} if self.config.finetune_epochs else {}

    def receive(self, state: Mapping[str, Tensor], message: Message, client: Knowledge) -> State:
        if not self.config.finetune_epochs:
            return dict(message.tensors)
        return {**message.tensors, **{travelling(name): tensor for name, tensor in message.tensors.items()}}

    def phases(self) -> list[Phase]:
        if not self.config.finetune_epochs:
            return super().phases()
        return [
            Phase("model", trains=("travelling",), loss=self.travelling_loss, epochs=self.training.epochs),
            Phase("finetuning", trains=("model",), loss=self.loss, epochs=self.config.finetune_epochs),
        ]

    def travelling_loss(self, net: ClientNetwork, batch: Batch) -> Tensor:
        """The loss of the network that is sent."""
        return cross_entropy(net.travelling(batch.x), batch.y)

    def sent(self, state: Mapping[str, Tensor]) -> State:
        if not self.config.finetune_epochs:
            return super().sent(state)
        return {name: state[travelling(name)] for name in self._travels}


def travelling(name: str) -> str:
    """Where a client keeps the tensor that travels under a name of its model."""
    return "travelling" + name.removeprefix(FedAvg.module)
