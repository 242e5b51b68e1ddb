"""Attention made of plain operations, which `vmap` can stack, and whose dropout may be anyone's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

Projection = tuple[Tensor, Tensor | None]
"""A linear layer's weight and bias."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    added: Tensor | None = None,
    scale: float | None = None,
    drop: Callable[[Tensor], Tensor] = lambda weights: weights,
) -> tuple[Tensor, Tensor]:
    """Mean values weighted by how well keys fit queries, and these weights.

    `added` is added to the scores; −∞ hides a key, and a query from which all are hidden gets zeros.
    """
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if added is None:
        weights = drop(scores.softmax(-1))
    else:
        scores = scores + added
        blind = (scores == -torch.inf).all(-1, keepdim=True)
        weights = drop(scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0))
    return weights @ value, weights


def multi_head(
    inputs: Sequence[Tensor],
    heads: int,
    projections: Sequence[Projection],
    output: Projection,
    padding: Tensor | None,
    mask: Tensor | None,
    drop: Callable[[Tensor], Tensor] = lambda weights: weights,
) -> tuple[Tensor, Tensor]:
    """What `nn.MultiheadAttention` computes, and each head's weights [batch, heads, length, length].

    Query, key and value are [length, batch, width] or [length, width]. In `padding` [batch, length] and `mask`, True
    hides a key; numbers are added to the scores.
    """
    single = inputs[0].dim() == 2
    if single:
        inputs = [part.unsqueeze(1) for part in inputs]
        padding = None if padding is None else padding.unsqueeze(0)
    query, key, value = (
        functional.linear(part, *projection).unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)
        for part, projection in zip(inputs, projections, strict=True)
    )
    added = None if padding is None else _numbers(padding, query.dtype)[:, None, None]
    if mask is not None:
        numbers = _numbers(mask, query.dtype)
        numbers = numbers.unflatten(0, (-1, heads)) if mask.dim() == 3 else numbers
        added = numbers if added is None else added + numbers
    means, weights = attend(query, key, value, added, drop=drop)
    result = functional.linear(means.permute(2, 0, 1, 3).flatten(2), *output)
    return (result.squeeze(1), weights.squeeze(0)) if single else (result, weights)


def _numbers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf)


def projections(together: Tensor | None, bias: Tensor | None, apart: Sequence[Tensor | None]) -> list[Projection]:
    """Those of query, key and value, from one weight for all three or one for each."""
    weights = apart if together is None else together.chunk(3)
    biases = (None, None, None) if bias is None else bias.chunk(3)
    return [(weight, own) for weight, own in zip(weights, biases, strict=True) if weight is not None]
