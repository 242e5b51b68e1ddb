"""Matrices that travel as two thin factors: the smallest rank that keeps a share of the energy, and never more floats.

A tensor is seen as a matrix W of its first axis by all others. Its best approximation of rank k keeps the k largest
singular values; it travels as its factors `NAME.left` [rows, k] and `NAME.right` [k, columns], or unchanged as
`NAME`, whichever has fewer floats. What travels unchanged is exact.

New weights have a flat spectrum, so their factors save nothing; what a few steps changed in them has a steep one. So
networks travel as `changes`: of a matrix the difference to a version that both sides hold, of a vector its new values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from polyfed.compute import available_cores
from polyfed.errors import BadMessage
from polyfed.message import Floats, Schema, State, largest_each
from polyfed.methods.parts.tools import is_variance

LEFT, RIGHT = ".left", ".right"
_SMALL = 32
"""The shorter side of a matrix whose eigenvectors a CPU has found before a GPU has launched its kernels."""
_MANY, _SMALL_FOR_MANY, _FEW_VALUES = 4, 512, 1 << 19
"""With so many cores, matrices with a side so short and so few values are factored on the CPU as a whole: a GPU finds
500 vectors in 5 ms, but of one matrix after another and in the way of other processes, a core in 29."""


def changes(state: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> State:
    """What leads from one version of a network to another: of a matrix the difference, of a vector its new values.

    Vectors are too small to be worth factoring, and as values they can be checked (no variance is negative).
    """
    return {name: tensor - base[name] if _is_matrix(tensor) else tensor for name, tensor in state.items()}


def changed(base: Mapping[str, Tensor], by: Mapping[str, Tensor]) -> State:
    """The version that `changes` lead to from another.

    >>> changed({"a": torch.ones(1, 1), "b": torch.ones(1)}, {"a": torch.ones(1, 1), "b": torch.ones(1)})
    {'a': tensor([[2.]]), 'b': tensor([1.])}
    """
    return {name: base[name] + change if _is_matrix(change) else change for name, change in by.items()}


def _is_matrix(tensor: Tensor) -> bool:
    return tensor.dim() >= 2


def compress(state: Mapping[str, Tensor], energy: float) -> State:
    """Every tensor in its smaller form, keeping at least this share of the sum of its squares.

    >>> sent = compress({"a": torch.ones(4, 5), "b": torch.eye(5)}, energy=0.9)
    >>> {name: tuple(tensor.shape) for name, tensor in sent.items()}
    {'a.left': (4, 1), 'a.right': (1, 5), 'b': (5, 5)}
    """
    sent: State = {}
    for name, tensor in state.items():
        factors = factorise(tensor, energy)
        sent |= {name: tensor} if factors is None else {name + LEFT: factors[0], name + RIGHT: factors[1]}
    return sent


def restore(sent: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> State:
    """The tensors that `compress` was given, except for what it left out; `like` has their names and shapes."""
    return {
        name: sent[name] if name in sent else _product(sent[name + LEFT], sent[name + RIGHT]).view(tensor.shape)
        for name, tensor in like.items()
    }


def _product(left: Tensor, right: Tensor) -> Tensor:
    # In double precision, so that whoever multiplies gets the same: a GPU may round floats to 10 bits before.
    return (left.double() @ right.double()).to(left.dtype)


def factorise(tensor: Tensor, energy: float) -> tuple[Tensor, Tensor] | None:
    """Two factors of the smallest rank that keeps the energy, or None if the tensor itself has no more floats."""
    if not _is_matrix(tensor):
        return None
    rows, columns = tensor.flatten(1).shape
    small = _SMALL_FOR_MANY if available_cores() >= _MANY and rows * columns <= _FEW_VALUES else _SMALL
    matrix = (tensor.cpu() if min(rows, columns) <= small else tensor).flatten(1).double()
    # Values that are not finite have no factors; the tensor travels as it is and the receiver refuses it.
    if rows * columns <= rows + columns or not bool(torch.isfinite(matrix).all()):
        return None
    # Squared singular values are the eigenvalues of the smaller Gram matrix, which takes less time than an SVD and in
    # double precision is more exact than float32 needs.
    wide = rows < columns
    gram = matrix @ matrix.T if wide else matrix.T @ matrix
    kept = _leading_vectors(gram, energy, (rows * columns - 1) // (rows + columns))
    if kept is None:
        return None
    left, right = (kept, kept.T @ matrix) if wide else (matrix @ kept, kept.T)
    return left.to(tensor).contiguous(), right.to(tensor).contiguous()


def _leading_vectors(gram: Tensor, energy: float, most: int) -> Tensor | None:
    """As many eigenvectors as keep the energy, by descending eigenvalue; None if these are more than `most`."""
    # The k largest eigenvalues have no smaller sum than the k largest entries of the diagonal (Schur), so these may
    # tell that the vectors pay off. Otherwise the eigenvalues do, which cost less.
    diagonal = gram.diagonal().sort(descending=True).values
    if needed_rank(diagonal, energy) > most and needed_rank(torch.linalg.eigvalsh(gram).flip(0), energy) > most:
        return None
    found = torch.linalg.eigh(gram)
    rank = min(needed_rank(found.eigenvalues.flip(0), energy), most)  # by rounding it could be one more
    kept: Tensor = found.eigenvectors[:, -rank:].flip(1)
    return kept


def needed_rank(squares: Tensor, energy: float) -> int:
    """The smallest k whose k first squared singular values, in descending order, reach the share of their sum.

    It may be all of them: a search that stops before the last would find nothing there and send zeros.

    >>> needed_rank(torch.tensor([6.0, 3.0, 1.0]), 0.9), needed_rank(torch.tensor([1.0, 1.0]), 0.99)
    (2, 2)
    """
    reached = squares.clamp(min=0).cumsum(0)
    return int((reached[:-1] < energy * reached[-1]).sum()) + 1


def compressed_schema(like: Mapping[str, Tensor]) -> Schema:
    """The schema of messages that `compress` makes from tensors of these shapes; `check_forms` checks the rest."""
    entries: dict[str, Floats] = {}
    for name, tensor in like.items():
        matrix = _is_matrix(tensor)
        entries[name] = Floats(tuple(tensor.shape), optional=matrix, negative=not is_variance(name))
        if matrix:
            rows, columns = tensor.flatten(1).shape
            rank = f"rank of {name}"
            entries[name + LEFT] = Floats((rows, rank), optional=True)
            entries[name + RIGHT] = Floats((rank, columns), optional=True)
    return Schema(entries)


def check_forms(sent: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> None:
    """Raise `BadMessage` unless every matrix comes in exactly one form, with a valid rank and a finite product."""
    for name, tensor in like.items():
        if not _is_matrix(tensor):
            continue
        forms = [form in sent for form in (name, name + LEFT, name + RIGHT)]
        if forms not in ([True, False, False], [False, True, True]):
            raise BadMessage(f"'{name}' must come either as it is or as its two factors '{LEFT}' and '{RIGHT}'.")
        if forms[0]:
            continue
        left, right = sent[name + LEFT], sent[name + RIGHT]
        largest = min(left.shape[0], right.shape[1])
        if not 1 <= left.shape[1] <= largest:
            raise BadMessage(f"the factors of '{name}' have rank {left.shape[1]}, not 1 to {largest}.")
        # The product itself takes longest to check, and its largest possible entry nearly always tells.
        bound = left.shape[1] * math.prod(largest_each([left, right]))
        if not bound < torch.finfo(left.dtype).max / 2 and not bool(torch.isfinite(left @ right).all()):
            raise BadMessage(f"the factors of '{name}' have a product that is not finite.")
