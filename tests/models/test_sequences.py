"""Networks for signals, tables and token ids: PyTorch's numbers, no influence of padding, clear refusals."""

from __future__ import annotations

import pickle
from copy import deepcopy

import pytest
import torch
from torch import nn

from polyfed.errors import InputError
from polyfed.models import GROUPS, default_auxiliary, default_features, resolve, smallest
from polyfed.models.text import TextCNN, TextRecurrent
from polyfed.shapes import TokenShape, noise

SHAPES: dict[str, tuple[int, ...]] = {
    "signal4": (3, 40),
    "text4": TokenShape((9,), vocabulary=20, padding=0),
    "tabular4": (7,),
}


def built(name: str, shape: tuple[int, ...]) -> nn.Module:
    torch.manual_seed(0)
    return resolve(name)[0].build(shape, 5).eval()


@pytest.mark.parametrize(("group", "features"), [("signal4", 128), ("text4", 128), ("tabular4", 64)])
def test_groups_have_four_different_networks_with_equal_features_and_heads(group: str, features: int) -> None:
    networks = [built(name, SHAPES[group]) for name in GROUPS[group]]
    assert [network.feature_size for network in networks] == [features] * 4
    assert all(isinstance(network.head, nn.Linear) for network in networks)
    assert len({sum(p.numel() for p in network.parameters()) for network in networks}) == 4
    assert default_features(group) is None
    x = noise(3, SHAPES[group], torch.Generator().manual_seed(1))
    assert all(network(x).shape == (3, 5) for network in networks)
    auxiliary = default_auxiliary(group)
    assert auxiliary in GROUPS[group]
    if group != "text4":  # where the smallest is one of the slow ones
        assert smallest(resolve(group), SHAPES[group], 5).name == auxiliary


@pytest.mark.parametrize("name", GROUPS["text4"])
def test_padding_has_no_influence(name: str) -> None:
    """A text of four tokens has the same features alone and followed by padding, whatever padding's vector is."""
    network = built(name, SHAPES["text4"])
    ids = torch.tensor([[3, 5, 7, 9, 0, 0, 0, 0, 0], [3, 5, 7, 9, 4, 4, 4, 4, 4]])
    before = network.features(ids)
    with torch.no_grad():
        network.extractor.embedding.vectors.weight[0] += 5
    after = network.features(ids)
    torch.testing.assert_close(after, before)
    assert not torch.allclose(before[0], before[1])
    if hasattr(network.extractor, "positions"):
        network.extractor.positions = nn.Parameter(network.extractor.positions[:4])
    torch.testing.assert_close(network.features(ids[:1, :4]), before[:1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", GROUPS["text4"])
def test_a_sample_of_padding_alone_has_finite_features(name: str) -> None:
    assert bool(built(name, SHAPES["text4"]).features(torch.zeros(2, 9, dtype=torch.int64)).isfinite().all())


@pytest.mark.parametrize("name", GROUPS["text4"])
def test_without_padding_every_id_counts(name: str) -> None:
    network = built(name, TokenShape((9,), vocabulary=20))
    one, other = torch.zeros(1, 9, dtype=torch.int64), torch.zeros(1, 9, dtype=torch.int64)
    other[0, 3] = 1
    with torch.no_grad():
        network.extractor.embedding.vectors.weight[0] += 1
    assert not torch.allclose(network.features(one), network.features(other))


@pytest.mark.parametrize(("name", "kind"), [("text_gru", nn.GRU), ("text_lstm", nn.LSTM)])
def test_recurrent_networks_compute_what_pytorch_s_layers_compute(name: str, kind: type[nn.RNNBase]) -> None:
    extractor = built(name, TokenShape((9,), vocabulary=20)).extractor
    assert isinstance(extractor, TextRecurrent)
    reference = kind(64, 64, batch_first=True)
    reference.load_state_dict(
        {
            "weight_ih_l0": extractor.given.weight,
            "bias_ih_l0": extractor.given.bias,
            "weight_hh_l0": extractor.kept.weight,
            "bias_hh_l0": extractor.kept.bias,
        }
    )
    ids = torch.randint(20, (4, 9), generator=torch.Generator().manual_seed(2))
    vectors, real = extractor.embedding(ids)
    torch.testing.assert_close(extractor.summary(vectors, real), reference(vectors)[0][:, -1], rtol=1e-5, atol=1e-6)


def test_a_filter_of_textcnn_answers_to_its_own_tokens() -> None:
    """The filter over three tokens adds the first component of each vector: 1 + 2 + 4 in the text 1 2 4."""
    network = TextCNN(TokenShape((5,), vocabulary=5, padding=0), filters=1, features=2, name="text_cnn")
    with torch.no_grad():
        network.embedding.vectors.weight[:, 0] = torch.arange(5.0)
        for layer in network.convolutions:
            assert isinstance(layer, nn.Conv1d) and layer.bias is not None
            layer.weight.zero_()
            layer.weight[0, 0] = 1
            layer.bias.zero_()
    vectors, real = network.embedding(torch.tensor([[1, 2, 4, 0, 0], [1, 1, 1, 1, 1]]))
    assert network.summary(vectors, real).tolist() == [[7.0, 7.0, 7.0], [3.0, 4.0, 5.0]]


def test_a_shape_of_tokens_survives_copies() -> None:
    shape = TokenShape((9,), vocabulary=20, padding=0)
    for copied in (deepcopy(shape), pickle.loads(pickle.dumps(shape))):  # noqa: S301 — our own bytes
        assert (copied, copied.vocabulary, copied.padding) == ((9,), 20, 0)


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("cnn1", (9, 128), r"not \(9, 128\) \(networks for other data: --models signal4 for signals\)"),
        ("cnn1", (7,), "--models tabular4 for tables"),
        ("resnet4", SHAPES["text4"], "not token ids of shape .* --models text4"),
        ("signal_cnn1", (3, 32, 32), r"needs signals of shape \(channels, length\), not \(3, 32, 32\)"),
        ("signal_cnn1", (7,), r"for a single channel, x\[:, None\]"),
        ("signal_cnn1", (128, 9), r"more channels than time steps: .* x.transpose\(0, 2, 1\)"),
        ("signal_cnn1", (1, 7), "at least 8 time steps, not 7"),
        ("signal_cnn1", SHAPES["text4"], "not token ids: use --models text4"),
        ("tabular_mlp1", SHAPES["text4"], "not token ids: use --models text4"),
        ("text_gru", (9,), r"samples are numbers of shape \(9,\): give integers with their vocabulary"),
    ],
)
def test_samples_of_another_kind_are_refused(name: str, shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(InputError, match=words):
        built(name, shape)


@pytest.mark.parametrize("name", ["signal_cnn1", "signal_cnn4"])
def test_the_shortest_signals(name: str) -> None:
    stages = 3 if name == "signal_cnn1" else 2
    assert built(name, (1, 2**stages))(torch.zeros(2, 1, 2**stages)).shape == (2, 5)
