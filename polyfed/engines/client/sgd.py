"""How a client's parameters change: SGD that starts afresh in every phase, in little memory where possible."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from polyfed.errors import RunError
from polyfed.methods.base import Training


@contextmanager
def sgd(
    parameters: Iterable[nn.Parameter],
    lr: float,
    training: Training,
    clipped: Sequence[Sequence[nn.Parameter]],
    *,
    early: bool = False,
) -> Iterator[Callable[[], None]]:
    """Inside, call the returned function after every `backward`: it makes the step and drops the gradients.

    Gradients are clipped in each of the groups `clipped` by itself, if training clips. If `early`, on a CPU and unless
    gradients are clipped, each parameter is updated as soon as its gradient is there: gradients are never all in
    memory at once, and each is used while it is still in the cache. The numbers are those of torch.optim.SGD in
    both cases, but only for code that does not bypass autograd (`.data`): that would see a changed parameter.
    """
    parameters = list(dict.fromkeys(parameters))
    if early and training.clip is None and all(parameter.device.type == "cpu" for parameter in parameters):
        with _early_steps(parameters, lr, training.momentum, training.weight_decay) as stepped:
            yield stepped.clear
        return
    optimiser = torch.optim.SGD(parameters, lr, training.momentum, weight_decay=training.weight_decay)

    def step() -> None:
        if training.clip is not None:
            for group in clipped:
                nn.utils.clip_grad_norm_(group, training.clip)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    yield step


@contextmanager
def _early_steps(
    parameters: Sequence[nn.Parameter], lr: float, momentum: float, decay: float
) -> Iterator[set[nn.Parameter]]:
    """Gives the parameters that were already updated; clear it after every `backward`."""
    moments: dict[nn.Parameter, Tensor] = {}
    stepped: set[nn.Parameter] = set()

    @torch.no_grad()
    def step(parameter: nn.Parameter) -> None:
        direction = parameter.grad
        assert direction is not None
        if parameter in stepped:
            raise RunError(
                "a parameter got its gradient in two parts, as with torch.utils.checkpoint and use_reentrant=True: "
                "set use_reentrant=False."
            )
        stepped.add(parameter)
        parameter.grad = None
        if decay:
            direction = direction.add(parameter, alpha=decay)
        if momentum:
            before = moments.get(parameter)
            direction = direction.clone() if before is None else before.mul_(momentum).add_(direction)
            moments[parameter] = direction
        parameter.add_(direction, alpha=-lr)

    hooks = [parameter.register_post_accumulate_grad_hook(step) for parameter in parameters]
    try:
        yield stepped
    except RuntimeError as error:
        if "modified by an inplace operation" in str(error) and stepped:
            raise RunError(
                "backward needs a tensor that was changed meanwhile: either the network changes one in place, or the "
                "loss uses a trained parameter without its gradient after the parameter was updated; then use "
                "a copy, parameter.detach().clone()."
            ) from error
        raise
    finally:
        for hook in hooks:
            hook.remove()
