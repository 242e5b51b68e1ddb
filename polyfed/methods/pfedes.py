"""pFedES: clients share a small proxy extractor that enhances their images (Yi et al., AAAI 2025)."""

from __future__ import annotations

from copy import deepcopy
from typing import Self

from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn

from polyfed.addresses import load_trusted
from polyfed.errors import InputError
from polyfed.message import State
from polyfed.methods.base import Batch, ClientNetwork, Phase, SplitNetwork, Task
from polyfed.methods.parts.averaged import Averaged
from polyfed.methods.parts.tools import cross_entropy, module_state
from polyfed.models import ProxyExtractor, seed_dropout
from polyfed.models.dryrun import dry_run, example_images
from polyfed.models.factories import call_factory
from polyfed.models.networks import Activation


class PFedES(Averaged):
    """A network from images to images precedes every private model; only this network travels and is averaged.

    The two train in turn, each while the other is frozen. The proxy is not used for prediction.
    """

    name = "pfedes"
    title = "pFedES"
    paper = "Yi et al., AAAI 2025"
    sends = "a small proxy extractor"
    reveals = (
        "Next to what the server sent, these weights are an update from which something about images and labels can "
        "be inferred. The proxy is small, which limits how much. The number of training samples is sent too."
    )
    module = "proxy"
    grid = {"weight": (0.1, 0.2, 0.3, 0.4, 0.5), "proxy_epochs": (1, 5, 10, 20)}

    class Config(Averaged.Config):
        weight: float = Field(
            0.1, gt=0, le=0.5, description="weight of the enhanced images in the model's loss (the paper's mu)"
        )
        proxy_epochs: int | None = Field(
            None, ge=1, description="epochs of the proxy in a round; none: as many as the model's"
        )
        proxy_lr: float | None = Field(None, gt=0, description="learning rate of the proxy; none: the model's")
        joint: bool = Field(
            False, description="train the model and the proxy together on the model's loss (an ablation), not in turn"
        )
        activation: Activation = Field(
            "relu", description="what the two convolutions end with: relu as the released code, none or tanh"
        )
        proxy: str = Field(
            "convolutions", description="convolutions, or package.module:factory of a network from images to images"
        )

        @field_validator("activation", mode="before")
        @classmethod
        def _no_activation(cls, value: object) -> object:
            """On the command line and in YAML, none may arrive as no value."""
            return "none" if value is None else value

        @model_validator(mode="after")
        def _one_phase_has_one_rate(self) -> Self:
            if self.joint and (self.proxy_lr is not None or self.proxy_epochs is not None):
                raise InputError(
                    "pfedes trains the proxy with the model's learning rate and epochs if joint is true: leave out "
                    "proxy_lr and proxy_epochs."
                )
            return self

    config: Config

    def new_proxy(self) -> nn.Module:
        """A proxy extractor for this task's images, checked: what comes out has the shape of what goes in."""
        if self.config.proxy == "convolutions":
            return ProxyExtractor(self.task.input_shape, activation=self.config.activation)
        return own_proxy(self.config.proxy, self.task)

    # The client's side -----------------------------------------------------------------------------------------------

    def client_modules(self, model: SplitNetwork) -> dict[str, nn.Module]:
        return {"proxy": self.new_proxy()}

    def phases(self) -> list[Phase]:
        config, epochs = self.config, self.training.epochs
        if config.joint:
            return [Phase("model", trains=("model", "proxy"), loss=self.model_loss, epochs=epochs)]
        proxy_epochs = config.proxy_epochs or epochs
        return [
            Phase("model", trains=("model",), loss=self.model_loss, epochs=epochs),
            Phase("proxy", trains=("proxy",), loss=self.proxy_loss, epochs=proxy_epochs, lr=config.proxy_lr),
        ]

    def model_loss(self, net: ClientNetwork, batch: Batch) -> Tensor:
        """Eq. 6 of the paper: the private model on enhanced and on original images."""
        enhanced = self.proxy_loss(net, batch)
        original = cross_entropy(net(batch.x), batch.y)
        return self.config.weight * enhanced + (1 - self.config.weight) * original

    def proxy_loss(self, net: ClientNetwork, batch: Batch) -> Tensor:
        """Eq. 9 of the paper: the private model on enhanced images."""
        return cross_entropy(net(net.proxy(batch.x)), batch.y)

    def inspect(self, net: ClientNetwork, batch: Batch) -> dict[str, Tensor]:
        # With ReLU at its end the proxy can die; no gradient brings it back, and nothing else would show it.
        zeros = net.proxy(batch.x) == 0
        remark = "the proxy extractor gives only zeros and can't learn any more; activation=none avoids that"
        remarks = {remark: zeros.all()}
        if zeros.ndim < 4:  # no image with channels
            return remarks
        dead = zeros.transpose(0, 1).flatten(1).all(1)
        return remarks | {
            f"channel {channel} of the proxy extractor's images is only zeros; activation=none avoids that": (
                dead[channel] & ~dead.all()
            )
            for channel in range(len(dead))
        }

    # The server's side: Eq. 11 of the paper, but weighted by the participants' samples. The paper divides by those of
    # all clients, so the proxy would shrink whenever some are missing.

    def first_state(self) -> State:
        return module_state("proxy", self.task.seeded_module(self.new_proxy, "proxy"))


def own_proxy(address: str, task: Task) -> nn.Module:
    """The user's own proxy extractor, or an error that says why it can't be one."""
    found = load_trusted(address, "proxy")
    if isinstance(found, nn.Module):
        proxy = deepcopy(found)
    elif callable(found):
        proxy = call_factory(found, address, task.input_shape, task.classes)
    else:
        raise InputError(f"'{address}' is a value of type {type(found).__name__}, not a network or what makes one.")
    proxy = seed_dropout(proxy).float()
    images = example_images(proxy, task.input_shape)
    output = dry_run(proxy, images, address).output
    if not isinstance(output, Tensor) or output.shape != images.shape:
        given = tuple(output.shape[1:]) if isinstance(output, Tensor) else f"a value of type {type(output).__name__}"
        raise InputError(
            f"the proxy extractor {address} must give images of the shape it gets, {task.input_shape}, but it gives "
            f"{given}."
        )
    if not any(True for _ in proxy.parameters()):
        raise InputError(f"the proxy extractor {address} has no parameters, so there is nothing to train and share.")
    return proxy
