"""Networks for token ids, without their heads: a CNN, a transformer encoder, a GRU and an LSTM.

They are made of plain operations instead of PyTorch's fused recurrent and attention layers, for which `vmap` has no
rules: so clients with them can be trained together. Padding has no influence on a sample's features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from polyfed.errors import InputError
from polyfed.shapes import TokenShape

State = tuple[Tensor, ...]
"""What a recurrent layer remembers: its output, and its cell if it is an LSTM."""
WIDTH = 64
"""Numbers in the vector of a token."""


def token_shape(input_shape: Sequence[int], name: str) -> TokenShape:
    """The shape of token ids, or an error where samples are something else."""
    if isinstance(input_shape, TokenShape):
        return input_shape
    raise InputError(
        f"{name} needs token ids, but samples are numbers of shape {tuple(input_shape)}: give integers with their "
        "vocabulary, from_arrays(x, y, vocabulary=…, padding=…), or use networks for such data (--models signal4 or "
        "tabular4)."
    )


class Embedding(nn.Module):
    """The vectors of token ids, [batch, length, width], zeros for padding; and which ids count, [batch, length]."""

    def __init__(self, shape: TokenShape, width: int = WIDTH) -> None:
        super().__init__()
        self.padding = shape.padding
        self.vectors = nn.Embedding(shape.vocabulary, width)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        real = torch.ones_like(ids, dtype=torch.bool) if self.padding is None else ids != self.padding
        vectors: Tensor = self.vectors(ids)
        return vectors * real.unsqueeze(-1), real


class TextNetwork(nn.Module):
    """Token vectors, then one vector per sample (`summary`), then a linear layer with ReLU."""

    def __init__(self, shape: TokenShape, summary: int, features: int) -> None:
        super().__init__()
        self.embedding = Embedding(shape)
        self.fc = nn.Linear(summary, features)
        self.match: nn.Module = nn.Identity()

    def forward(self, ids: Tensor) -> Tensor:
        features: Tensor = self.match(self.fc(self.summary(*self.embedding(ids))).relu())
        return features

    def summary(self, vectors: Tensor, real: Tensor) -> Tensor:
        """One vector per sample from the vectors of its tokens, and which of these count."""
        raise NotImplementedError


class TextCNN(TextNetwork):
    """Filters over three, four and five neighbouring tokens, and the largest answer of each along the text."""

    def __init__(self, input_shape: Sequence[int], filters: int, features: int, name: str) -> None:
        super().__init__(token_shape(input_shape, name), 3 * filters, features)
        # Zeros on both sides, so that a text shorter than a filter has an answer too.
        self.convolutions = nn.ModuleList(nn.Conv1d(WIDTH, filters, size, padding=size - 1) for size in (3, 4, 5))

    def summary(self, vectors: Tensor, real: Tensor) -> Tensor:
        along = vectors.transpose(1, 2)
        # ReLU first: a window of nothing but padding answers with its bias, which must not count.
        return torch.cat([self._largest(layer, along, real) for layer in self.convolutions], 1)

    @staticmethod
    def _largest(layer: nn.Module, along: Tensor, real: Tensor) -> Tensor:
        answers: Tensor = layer(along)
        assert isinstance(layer, nn.Conv1d)
        touched = nn.functional.max_pool1d(
            nn.functional.pad(real.to(along.dtype), (layer.kernel_size[0] - 1,) * 2).unsqueeze(1),
            layer.kernel_size[0],
            stride=1,
        )
        return (answers.relu() * touched).amax(2)


class TextTransformer(TextNetwork):
    """Transformer encoder blocks on tokens with learned positions, and the mean over tokens."""

    def __init__(self, input_shape: Sequence[int], blocks: int, heads: int, features: int, name: str) -> None:
        shape = token_shape(input_shape, name)
        super().__init__(shape, WIDTH, features)
        self.positions = nn.Parameter(torch.randn(shape[0], WIDTH) * 0.02)
        self.blocks = nn.ModuleList(Block(WIDTH, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)

    def summary(self, vectors: Tensor, real: Tensor) -> Tensor:
        x = vectors + self.positions
        for block in self.blocks:
            x = block(x, real)
        return _mean(self.norm(x), real)


class Block(nn.Module):
    """Attention between tokens, then two linear layers for each token, both after a norm and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.asked = nn.Linear(width, 3 * width)
        self.answered = nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        query, key, value = self.asked(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = query @ key.mT / query.shape[-1] ** 0.5
        # Not −inf: in a sample of nothing but padding all scores would be, and softmax would give NaN.
        weights = scores.masked_fill(~real[:, None, None], torch.finfo(scores.dtype).min).softmax(-1)
        x = x + self.answered((weights @ value).transpose(1, 2).flatten(2))
        result: Tensor = x + self.narrow(self.wide(self.norm2(x)).relu())
        return result


class TextRecurrent(TextNetwork):
    """A GRU or an LSTM over the tokens; its state after the last one. Padding leaves the state as it is."""

    gates: int

    def __init__(self, input_shape: Sequence[int], hidden: int, features: int, name: str) -> None:
        super().__init__(token_shape(input_shape, name), hidden, features)
        self.hidden = hidden
        self.given = nn.Linear(WIDTH, self.gates * hidden)
        self.kept = nn.Linear(hidden, self.gates * hidden)
        for layer in (self.given, self.kept):  # as PyTorch's recurrent layers start
            for parameter in layer.parameters():
                nn.init.uniform_(parameter, -(hidden**-0.5), hidden**-0.5)

    def summary(self, vectors: Tensor, real: Tensor) -> Tensor:
        state: State = self.first(vectors)
        counted = real.unsqueeze(-1)
        given = self.given(vectors)  # for all tokens at once; only the rest has to be one after another
        for position in range(vectors.shape[1]):
            counts = counted[:, position]
            pairs = zip(self.step(given[:, position], state), state, strict=True)
            state = tuple(torch.where(counts, new, old) for new, old in pairs)
        return state[0]

    def first(self, vectors: Tensor) -> State:
        """The state before the first token."""
        return (vectors.new_zeros(vectors.shape[0], self.hidden),)

    def step(self, given: Tensor, state: State) -> State:
        """The state after one more token."""
        raise NotImplementedError


class TextGRU(TextRecurrent):
    """The GRU of PyTorch, with its order of gates: reset, update, new."""

    gates = 3

    def step(self, given: Tensor, state: State) -> State:
        return gru_step(given, self.kept(state[0]), state)


class TextLSTM(TextRecurrent):
    """The LSTM of PyTorch, with its order of gates: input, forget, cell, output."""

    gates = 4

    def first(self, vectors: Tensor) -> State:
        zeros = vectors.new_zeros(vectors.shape[0], self.hidden)
        return zeros, zeros

    def step(self, given: Tensor, state: State) -> State:
        return lstm_step(given, self.kept(state[0]), state)


def gru_step(given: Tensor, kept: Tensor, state: State) -> State:
    """A GRU's state after one more input, from what its two linear layers make of the input and of the state."""
    reset, update, new = given.chunk(3, -1)
    kept_reset, kept_update, kept_new = kept.chunk(3, -1)
    update = (update + kept_update).sigmoid()
    new = (new + (reset + kept_reset).sigmoid() * kept_new).tanh()
    return (new + update * (state[0] - new),)


def lstm_step(given: Tensor, kept: Tensor, state: State) -> State:
    """The same of an LSTM, whose state is its output and its cell."""
    into, forget, new, out = (given + kept).chunk(4, -1)
    cell = forget.sigmoid() * state[1] + into.sigmoid() * new.tanh()
    return out.sigmoid() * cell.tanh(), cell


def _mean(vectors: Tensor, real: Tensor) -> Tensor:
    """The mean over tokens that count; zeros where none does."""
    counted = real.unsqueeze(-1)
    return (vectors * counted).sum(1) / counted.sum(1).clamp(min=1)
