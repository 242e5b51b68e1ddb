"""What several methods share: losses per sample, parts of a state, means over replies, vectors per class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from polyfed.compute import to_device
from polyfed.errors import BadMessage
from polyfed.losses import cross_entropy as cross_entropy
from polyfed.message import Counts, Floats, Labels, Message, Schema, State
from polyfed.models.frozen import rest_of

if TYPE_CHECKING:
    from polyfed.methods.base import Reply

SAMPLES = {"samples": Counts((1,))}
"""Schema of the metadata behind a mean weighted by samples."""

ROUNDING = 1e-5
"""A vector and the same one calculated in another batch differ by less, as a share of their length."""


def distance(a: Tensor, b: Tensor, kind: Literal["euclidean", "mse"] = "euclidean") -> Tensor:
    """Distance of vectors along the last axis: the Euclidean norm of the difference, or its mean square.

    The norm has no gradient at zero; zero is used there. What is closer to `b` than rounding can tell is at zero: the
    feature of a class's only sample is its class's prototype, and the gradient would have length one in any direction.
    """
    squares = (a - b).square()
    if kind == "mse":
        return squares.mean(-1)
    total = squares.sum(-1)
    positive = total > ROUNDING**2 * b.square().sum(-1)
    return torch.where(positive, torch.where(positive, total, 1.0).sqrt(), 0.0)


def unit_vectors(vectors: Tensor) -> Tensor:
    """The vectors at length one; a vector shorter than 1e-12 has no direction and becomes zero, with gradient zero.

    Features are zero where a ReLU has died; dividing them by a small number instead would give gradients of 1e12.
    """
    exact = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
    squares = exact.square().sum(-1, keepdim=True)
    long = squares > 1e-24
    return torch.where(long, exact * torch.where(long, squares, 1.0).rsqrt(), 0.0)


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Cosine of the angle between vectors along the last axis; zero, with gradient zero, where one has no direction.

    >>> cosine(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
    tensor([0.6000, 0.0000])
    """
    return (unit_vectors(a) * unit_vectors(b)).sum(-1)


def part_of(state: Mapping[str, Tensor], module: str) -> State:
    """The float tensors of one module in a flat state; integer counters of batch norm stay with the client.

    >>> sorted(part_of({"model.head.bias": torch.zeros(2), "model.head_norm": torch.zeros(1)}, "model.head"))
    ['model.head.bias']
    """
    return {
        name: tensor for name, tensor in state.items() if name.startswith(f"{module}.") and tensor.is_floating_point()
    }


def module_state(name: str, module: nn.Module) -> State:
    """A module's float tensors, named as in a client's flat state: tied weights once, under their first name.

    What is frozen in it is left out: nobody changes it, so nobody sends it.
    """
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    resting = rest_of(module).tensors
    moving = {key: tensor for key, tensor in tensors.items() if key not in resting}
    return part_of({f"{name}.{key}": tensor.detach().clone() for key, tensor in moving.items()}, name)


def same_shapes(state: Mapping[str, Tensor]) -> dict[str, Floats]:
    """The schema of messages that carry tensors of these shapes; the variances of batch norm are never negative."""
    return {name: Floats(tuple(tensor.shape), negative=not is_variance(name)) for name, tensor in state.items()}


def is_variance(name: str) -> bool:
    """Whether an entry of a network's state holds batch norm's running variances."""
    return name.rpartition(".")[2] == "running_var"


def weighted_mean(replies: Sequence[Reply]) -> State:
    """The replies' tensors averaged, each weighted by its client's share of the participants' samples."""
    counts = [int(reply.message.metadata["samples"]) for reply in replies]
    return _mean(replies, [count / sum(counts) for count in counts])


def plain_mean(replies: Sequence[Reply]) -> State:
    """The replies' tensors averaged with equal weights."""
    return _mean(replies, [1 / len(replies)] * len(replies))


def _mean(replies: Sequence[Reply], weights: Sequence[float]) -> State:
    return {
        name: sum((w * r.message.tensors[name] for w, r in zip(weights, replies, strict=True)), torch.zeros(()))
        for name in replies[0].message.tensors
    }


class ClassVectors(nn.Module):
    """One vector per class as a client received it (prototypes, mean features, mean logits) and which are known."""

    vectors: Tensor
    known: Tensor

    def __init__(self, classes: int, size: int) -> None:
        super().__init__()
        self.register_buffer("vectors", torch.zeros(classes, size))
        self.register_buffer("known", torch.zeros(classes, dtype=torch.bool))

    def distance(self, vectors: Tensor, labels: Tensor, kind: Literal["euclidean", "mse"] = "euclidean") -> Tensor:
        """Distance of each vector to the vector of its class; zero where that is unknown."""
        return torch.where(self.known[labels], distance(vectors, self.vectors[labels], kind), 0.0)

    def closeness(self, vectors: Tensor, *, directions: bool = False) -> Tensor:
        """Scores [batch, classes] for prediction: minus the Euclidean distance, minus infinity where unknown.

        With `directions`, lengths do not count: all vectors are brought to length one, so the nearest one has the
        largest cosine.
        """
        own = self.vectors
        if directions:
            vectors, own = unit_vectors(vectors), unit_vectors(own)
        # Not by expanding the square: its terms cancel, and a GPU may round them to 10 bits first.
        distances = torch.cdist(vectors, own, compute_mode="donot_use_mm_for_euclid_dist")
        if directions:  # those of a zero vector are lengths of one, whose rounding must not decide
            distances = torch.where(vectors.any(-1, keepdim=True), distances, own.any(-1).to(distances.dtype))
        return torch.where(self.known, -distances, -torch.inf)


def class_vectors_schema(name: str, classes: int, size: int, *, counts: bool = False) -> Schema:
    """Messages that carry one vector for each of some classes, with their labels and perhaps counts."""
    metadata: dict[str, Labels | Counts] = {"labels": Labels(classes)}
    if counts:
        metadata["counts"] = Counts(("seen",))
    return Schema({name: Floats(("seen", size))}, metadata)


def mean_by_class(vectors: Tensor, labels: Tensor, weights: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """The weighted mean of the vectors of each label that occurs, summed in float64, and those labels, ascending.

    >>> means, labels = mean_by_class(torch.tensor([[1.0], [3.0]]), torch.tensor([4, 4]), torch.ones(2), 5)
    >>> means.tolist(), labels.tolist()
    ([[2.0]], [4])
    """
    weights = weights.double()
    sums = torch.zeros(classes, vectors.shape[1], dtype=torch.float64, device=vectors.device)
    sums.index_add_(0, labels, vectors * weights[:, None])
    totals = torch.zeros(classes, dtype=torch.float64, device=vectors.device).index_add_(0, labels, weights)
    seen = totals.nonzero().flatten()
    return (sums[seen] / totals[seen, None]).float(), seen


def known_vectors(server_state: Mapping[str, Tensor], name: str) -> Message:
    """A download of the server's known class vectors; empty while there are none."""
    known = server_state[f"{name}.known"].nonzero().flatten()
    if len(known) == 0:
        return Message()
    return Message({name: server_state[f"{name}.vectors"][known]}, {"labels": known})


def store_vectors(state: Mapping[str, Tensor], name: str, vectors: Tensor, labels: Tensor) -> State:
    """The entries of a `ClassVectors` module's state after it received vectors for some classes."""
    _check_rows(vectors, labels)
    kept, known = state[f"{name}.vectors"], state[f"{name}.known"]
    return {
        f"{name}.vectors": kept.index_copy(0, labels, vectors.to(kept)),
        f"{name}.known": known.index_fill(0, labels, True),
    }


def store_all(
    states: Sequence[Mapping[str, Tensor]], name: str, vectors: Sequence[Tensor], labels: Sequence[Tensor]
) -> list[State]:
    """The same for several clients at once."""
    for own, classes in zip(vectors, labels, strict=True):
        _check_rows(own, classes)
    places = rows_of_all(labels)
    kept, known = (torch.stack([state[f"{name}.{part}"] for state in states]) for part in ("vectors", "known"))
    kept.index_put_(places, torch.cat(list(vectors)).to(kept))
    known.index_put_(places, known.new_ones(()))
    return [{f"{name}.vectors": own, f"{name}.known": seen} for own, seen in zip(kept, known, strict=True)]


def rows_of_all(labels: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Where the rows of several messages belong in a table [messages, classes, …]: their messages and their classes.

    >>> rows_of_all([torch.tensor([0, 3]), torch.tensor([1])])
    (tensor([0, 0, 1]), tensor([0, 3, 1]))
    """
    owners = [owner for owner, own in enumerate(labels) for _ in range(len(own))]
    return to_device(torch.tensor(owners, dtype=torch.int64), labels[0].device), torch.cat(list(labels))


def _check_rows(vectors: Tensor, labels: Tensor) -> None:
    if len(vectors) != len(labels):
        raise BadMessage(f"there are {len(vectors)} vectors for {len(labels)} classes.")
