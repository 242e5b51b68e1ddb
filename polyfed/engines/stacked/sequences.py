"""Attention and recurrent layers as plain operations: `vmap` has no rules for PyTorch's fused ones.

Each function takes the arguments of the one that it replaces and returns its result, or None for what it leaves alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from polyfed.models.attention import attend, multi_head, projections
from polyfed.models.text import State, gru_step, lstm_step

Step = Callable[[Tensor, Tensor, State], State]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """`functional.scaled_dot_product_attention` without dropout, which would draw from the global generator."""
    if dropout_p:
        return None
    if enable_gqa:
        key, value = (part.repeat_interleave(query.shape[-3] // part.shape[-3], -3) for part in (key, value))
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # here, unlike in layers, True lets a key be seen
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
    return attend(query, key, value, attn_mask, scale)[0]


def attention_layer(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    width: int,
    heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, None] | None:
    """`functional.multi_head_attention_forward` where it would use a fused kernel; elsewhere it is plain itself."""
    unusual = any(part is not None for part in (bias_k, bias_v, static_k, static_v)) or add_zero_attn
    if need_weights or unusual or (training and dropout_p) or (is_causal and attn_mask is None):
        return None
    apart = (q_proj_weight, k_proj_weight, v_proj_weight)
    into = projections(None if use_separate_proj_weight else in_proj_weight, in_proj_bias, apart)
    output = (out_proj_weight, out_proj_bias)
    return multi_head((query, key, value), heads, into, output, key_padding_mask, attn_mask)[0], None


def recurrent(
    step: Step,
    x: Tensor,
    first: Any,
    weights: Any,
    biased: Any,
    layers: int,
    dropout: float,
    training: bool,
    both_ways: bool,
    batch_first: bool = False,
) -> tuple[Tensor, ...] | None:
    """`torch.lstm` and its relatives, one position after another; not for packed sequences, projections or dropout."""
    ways, each = 1 + both_ways, 4 if biased else 2
    if not isinstance(biased, bool) or len(weights) != layers * ways * each or (training and dropout and layers > 1):
        return None
    before = (first,) if isinstance(first, Tensor) else tuple(first)
    along = x.transpose(0, 1) if batch_first else x
    last: list[State] = []
    for layer in range(layers):
        outputs = []
        for way in range(ways):
            number = layer * ways + way
            own = weights[number * each : (number + 1) * each]
            output, state = _one_way(step, along, tuple(part[number] for part in before), own, backwards=way == 1)
            outputs.append(output)
            last.append(state)
        along = torch.cat(outputs, -1)
    after = (torch.stack(part) for part in zip(*last, strict=True))
    return along.transpose(0, 1) if batch_first else along, *after


def _one_way(
    step: Step, along: Tensor, state: State, weights: Sequence[Tensor], *, backwards: bool
) -> tuple[Tensor, State]:
    """One layer in one direction: its outputs [length, batch, width], and its state at the end."""
    of_input, of_state, *biases = weights
    input_bias, state_bias = biases or (None, None)
    given = functional.linear(along, of_input, input_bias)  # for all positions at once
    outputs = []
    for position in range(len(given))[:: -1 if backwards else 1]:
        state = step(given[position], functional.linear(state[0], of_state, state_bias), state)
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backwards else outputs), state


UNFUSED: dict[Callable[..., Any], Callable[..., Any]] = {
    functional.scaled_dot_product_attention: attention,
    functional.multi_head_attention_forward: attention_layer,
    torch.lstm: partial(recurrent, lstm_step),
    torch.gru: partial(recurrent, gru_step),
    torch.rnn_tanh: partial(recurrent, lambda given, kept, state: ((given + kept).tanh(),)),
    torch.rnn_relu: partial(recurrent, lambda given, kept, state: ((given + kept).relu(),)),
}


def keep_weights_apart(network: nn.Module) -> None:
    """Stop recurrent layers from arranging their weights for cuDNN, which stacked ones can't be, nor need to."""
    for module in network.modules():
        if isinstance(module, nn.RNNBase):
            module.__dict__["flatten_parameters"] = _nothing


def _nothing() -> None: ...
