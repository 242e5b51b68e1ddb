"""Transformers and recurrent networks train together: PyTorch's fused layers as plain operations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torchvision.models import VisionTransformer

from polyfed.engines.stacked import sequences
from polyfed.engines.stacked.layers import StackedLayers
from tests import support
from tests.engines.test_dropout import assert_engines_agree, notes


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Transformer(nn.Module):
    """A transformer of PyTorch's own layers, with dropout everywhere, in attention too."""

    batch_first = True

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            input_shape[2], nhead=2, dim_feedforward=8, dropout=0.3, batch_first=self.batch_first
        )
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.out = nn.Linear(input_shape[2], classes)

    def forward(self, x: Tensor) -> Tensor:
        rows = x[:, 0] if self.batch_first else x[:, 0].transpose(0, 1)
        logits: Tensor = self.out(self.encoder(rows).mean(1 if self.batch_first else 0))
        return logits


class PositionsFirst(Transformer):
    """The same with positions before samples, as PyTorch has it by default."""

    batch_first = False


class Vision(VisionTransformer):
    """torchvision's ViT, small, with dropout."""

    rate = 0.2

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        sizes = {"patch_size": 3, "num_layers": 2, "num_heads": 2, "hidden_dim": 8, "mlp_dim": 16}
        super().__init__(
            image_size=input_shape[1], num_classes=classes, dropout=self.rate, attention_dropout=self.rate, **sizes
        )


class StillVision(Vision):
    """The same without dropout: its attention is a fused kernel."""

    rate = 0.0


class Recurrent(nn.Module):
    """Rows of an image as a sequence, and a dropout layer behind the recurrent one."""

    kind: Any = nn.LSTM

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.rows = self.kind(input_shape[2], 3, num_layers=2, batch_first=True, bidirectional=True)
        self.drop, self.out = nn.Dropout(0.3), nn.Linear(6, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.drop(self.rows(x[:, 0])[0][:, -1]))
        return logits


class Gated(Recurrent):
    kind = nn.GRU


class Fused(nn.Module):
    """A network that calls fused attention itself."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.asked, self.out = nn.Linear(input_shape[2], 24), nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.asked(x[:, 0]).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        rows = functional.scaled_dot_product_attention(*heads, is_causal=True)
        logits: Tensor = self.out(rows.transpose(1, 2).flatten(2).mean(1))
        return logits


@pytest.mark.parametrize("network", [Transformer, PositionsFirst, Vision, StillVision, Recurrent, Gated, Fused])
def test_they_train_together_and_agree_with_the_loop(tmp_path: Path, network: type[nn.Module]) -> None:
    dataset = support.tiny_dataset(channels=3 if issubclass(network, Vision) else 1)
    stacked = assert_engines_agree(tmp_path, "fedproto", network, dataset=dataset, lr=0.02)
    assert notes(stacked) == []
    assert stacked.engine.population.draws == frozenset()


def same(layer: nn.Module, *inputs: Any, **given: Any) -> None:
    """What a layer returns inside is what it returns outside, in both modes."""
    for mode in (True, False):
        layer.train(mode)
        expected = layer(*inputs, **given)
        with StackedLayers():
            torch.testing.assert_close(layer(*inputs, **given), expected)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN, lambda *a, **o: nn.RNN(*a, nonlinearity="relu", **o)])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_layers": 3, "bidirectional": True}, {"batch_first": True, "bias": False}, {"bidirectional": True}],
    ids=str,
)
def test_recurrent_layers_compute_what_pytorch_does(
    monkeypatch: pytest.MonkeyPatch, kind: Any, options: dict[str, Any]
) -> None:
    layer, served = kind(4, 3, **options), []
    one_way = sequences._one_way
    monkeypatch.setattr(sequences, "_one_way", lambda *a, **o: served.append(1) or one_way(*a, **o))
    same(layer, numbers(5, 2, 4))
    same(layer, numbers(5, 4))  # a single sample
    states = layer.num_layers * (1 + layer.bidirectional)
    first = numbers(states, 5 if layer.batch_first else 2, 3)
    same(layer, numbers(5, 2, 4), (first, 2 * first) if isinstance(layer, nn.LSTM) else first)
    assert len(served) == 6 * states


def test_packed_sequences_and_projections_are_left_alone() -> None:
    packed = nn.utils.rnn.pack_padded_sequence(numbers(5, 2, 4), torch.tensor([5, 3]))
    for layer in (nn.LSTM(4, 3), nn.GRU(4, 3)):
        with StackedLayers():
            inside = layer(packed)[0].data
        torch.testing.assert_close(inside, layer(packed)[0].data)
    same(nn.LSTM(4, 3, proj_size=2), numbers(5, 2, 4))


@pytest.mark.parametrize(
    "given",
    [{}, {"key_padding_mask": torch.tensor([[False] * 5, [False] * 3 + [True] * 2])},
     {"attn_mask": torch.ones(5, 5).triu(1).bool(), "is_causal": True}, {"attn_mask": numbers(4, 5, 5)}],
    ids=["", "padding", "causal", "heads"],
)  # fmt: skip
def test_attention_layers_compute_what_pytorch_does(given: dict[str, Any]) -> None:
    for options in ({}, {"kdim": 8, "vdim": 8}, {"bias": False}, {"add_zero_attn": True}):
        layer = nn.MultiheadAttention(8, 2, **options, batch_first=True)
        x = numbers(2, 5, 8)
        for weights in (True, False):
            same(layer, x, x, numbers(2, 5, 8, seed=2), need_weights=weights, **given)


@pytest.mark.parametrize(
    "given",
    [{}, {"is_causal": True}, {"scale": 0.3}, {"attn_mask": torch.ones(4, 6).tril().bool()},
     {"attn_mask": numbers(2, 1, 4, 6)}, {"enable_gqa": True}],
    ids=["", "causal", "scale", "seen", "added", "grouped"],
)  # fmt: skip
def test_fused_attention_computes_what_pytorch_does(given: dict[str, Any]) -> None:
    heads = 1 if "enable_gqa" in given else 3
    inputs = (numbers(2, 3, 4, 8), numbers(2, heads, 6, 8, seed=2), numbers(2, heads, 6, 5, seed=3))
    expected = functional.scaled_dot_product_attention(*inputs, **given)
    result = sequences.attention(*inputs, **given)
    assert result is not None
    torch.testing.assert_close(result, expected)
    assert sequences.attention(*inputs, dropout_p=0.1) is None
