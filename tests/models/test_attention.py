"""Attention of plain operations computes what PyTorch's does; its dropout draws from its own generator."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyfed.models import seed_dropout, set_generator
from polyfed.models.attention import attend
from polyfed.models.dropout import SeededAttention

LENGTH, BATCH, WIDTH = 5, 3, 8
HIDDEN = torch.tensor([[False] * 5, [False, False, True, True, True], [False, True, False, False, True]])
CAUSAL = torch.ones(LENGTH, LENGTH).triu(1).bool()


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def pair(dropout: float = 0.3, **options: Any) -> tuple[nn.MultiheadAttention, SeededAttention]:
    """A layer that drops nothing, and one with dropout and the same weights."""
    own = seed_dropout(nn.MultiheadAttention(WIDTH, 2, dropout=dropout, **options))
    plain = nn.MultiheadAttention(WIDTH, 2, **options)
    plain.load_state_dict(own.state_dict())
    assert isinstance(own, SeededAttention)
    return plain, own


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("options", [{}, {"batch_first": True}, {"bias": False}, {"kdim": 4, "vdim": 6}], ids=str)
@pytest.mark.parametrize("kind", ["none", "causal", "numbers", "heads"])
@pytest.mark.parametrize("padded", [False, True])
def test_it_computes_what_pytorch_does(options: dict[str, Any], kind: str, padded: bool, dims: int) -> None:
    """With masks of 0.7 instead of ones, which undo the division by 1 − 0.3: so nothing is dropped."""
    plain, own = pair(**options)
    own.masks.given = lambda rate, shape: torch.ones(shape) * (1 - rate)
    sizes = (WIDTH, options.get("kdim", WIDTH), options.get("vdim", WIDTH))
    inputs = [numbers(*((LENGTH, BATCH) if dims == 3 else (LENGTH,)), size) for size in sizes]
    if options.get("batch_first") and dims == 3:
        inputs = [part.transpose(0, 1) for part in inputs]
    heads = numbers(2 * (BATCH if dims == 3 else 1), LENGTH, LENGTH)
    mask = {"causal": CAUSAL, "numbers": torch.where(CAUSAL, -2.0, 0.5), "heads": heads}.get(kind)
    hidden = (HIDDEN if dims == 3 else HIDDEN[1]) if padded else None
    for average in (True, False):
        given = {"key_padding_mask": hidden, "attn_mask": mask, "average_attn_weights": average}
        expected, actual = (layer.train()(*inputs, **given) for layer in (plain, own))
        for one, two in zip(actual, expected, strict=True):
            torch.testing.assert_close(one, two)
    assert own(*inputs, key_padding_mask=hidden, attn_mask=mask, need_weights=False)[1] is None
    expected, actual = (layer.eval()(*inputs, **given)[0] for layer in (plain, own))
    assert torch.equal(actual, expected)


def test_its_dropout_is_that_of_its_generator() -> None:
    """Of the 3 · 2 · 5 · 5 weights, those are zero for which the generator draws less than 0.3; others are / 0.7."""
    plain, own = pair()
    x = numbers(LENGTH, BATCH, WIDTH)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    set_generator(own, torch.Generator().manual_seed(5))
    weights = own(x, x, x, average_attn_weights=False)[1]
    kept = torch.rand(BATCH, 2, LENGTH, LENGTH, generator=torch.Generator().manual_seed(5)) >= 0.3
    torch.testing.assert_close(weights, plain(x, x, x, average_attn_weights=False)[1] * kept / 0.7)
    assert torch.equal(torch.get_rng_state(), before)


def test_only_what_is_understood_is_replaced() -> None:
    class Special(nn.MultiheadAttention):
        pass

    layers = [
        nn.MultiheadAttention(WIDTH, 2), nn.MultiheadAttention(WIDTH, 2, dropout=0.1, add_bias_kv=True),
        nn.MultiheadAttention(WIDTH, 2, dropout=0.1, add_zero_attn=True), Special(WIDTH, 2, dropout=0.1),
    ]  # fmt: skip
    assert not [layer for layer in map(seed_dropout, layers) if isinstance(layer, SeededAttention)]


def test_names_modes_and_copies_stay() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.1, batch_first=True).eval()
    names = list(layer.state_dict())
    seeded = seed_dropout(layer)
    assert list(seeded.state_dict()) == names
    assert not any(module.training for module in seeded.modules())
    copied = deepcopy(seeded)
    assert isinstance(copied.self_attn, SeededAttention) and copied.self_attn.masks is not seeded.self_attn.masks


def test_the_hint_of_a_causal_mask_without_one_is_refused_as_by_pytorch() -> None:
    _, own = pair()
    x = numbers(LENGTH, BATCH, WIDTH)
    with pytest.raises(RuntimeError, match="is_causal"):
        own(x, x, x, is_causal=True)


def test_a_query_that_sees_nothing_gets_zeros_and_passes_no_nan_back() -> None:
    x = numbers(2, 3).requires_grad_()
    added = torch.tensor([[0.0, 0.0], [-torch.inf, -torch.inf]])
    means, weights = attend(x, x, x, added)
    means.sum().backward()
    assert weights[1].tolist() == [0, 0] and means[1].tolist() == [0, 0, 0]
    assert x.grad is not None and bool(x.grad.isfinite().all())
