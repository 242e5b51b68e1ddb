"""Samples as they were given, of one client or of many, before they are checked and their labels are numbered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from polyfed.data.arrays import from_arrays, join_arrays, laid_out
from polyfed.data.dataset import Dataset
from polyfed.data.labels import as_array, in_order, is_text, numbered
from polyfed.errors import InputError


@dataclass(frozen=True)
class Samples:
    """Arrays as they were given, before they are checked and their labels are numbered."""

    x: Any
    y: Any
    x_test: Any = None
    y_test: Any = None
    class_names: Sequence[str] | None = None
    client: Any = None
    client_test: Any = None
    vocabulary: int | None = None
    """For token ids: how many different ones there are."""
    padding: int | None = None

    def laid_out(self, layout: str | None, name: str) -> Samples:
        """The same with images' channels first, from the layout that the user names."""
        parts = [None if part is None else laid_out(part, layout or "auto", name) for part in (self.x, self.x_test)]
        return replace(self, x=parts[0], x_test=parts[1])

    def dataset(self, name: str) -> Dataset:
        """These samples as a dataset."""
        return from_arrays(
            self.x, self.y, self.x_test, self.y_test, name,
            class_names=self.class_names, client=self.client, client_test=self.client_test,
            vocabulary=self.vocabulary, padding=self.padding,
        )  # fmt: skip


def join_samples(parts: Mapping[str, Samples]) -> Samples:
    """The samples of all clients, each with its owner; classes are matched by their names."""
    names, tokens = _common_names(parts), _common_tokens(parts)
    pieces, owners, testers = [], [], []
    for client, part in parts.items():
        whose = f"client {client}"
        y, y_test = (_by_name(each, part.class_names, names) for each in (part.y, part.y_test))
        y, y_test, _ = numbered(y, y_test, whose, names)
        images, labels, count = join_arrays(part.x, y, part.x_test, y_test, whose, tokens=tokens[0] is not None)
        cut = len(images) - count
        pieces.append((images[:cut], labels[:cut], images[cut:], labels[cut:]))
        owners += [client] * cut
        testers += [client] * count
        first, own = pieces[0][0], pieces[-1][0]
        if own.shape[1:] != first.shape[1:] or own.dtype != first.dtype:
            raise InputError(
                f"{whose} has {own.dtype} samples of shape {tuple(own.shape[1:])}, but others have {first.dtype} "
                f"samples of shape {tuple(first.shape[1:])}: make them the same."
            )
    x, y, x_test, y_test = (torch.cat(tensors) for tensors in zip(*pieces, strict=True))
    if not testers:
        return Samples(x, y, None, None, names, owners, None, *tokens)
    return Samples(x, y, x_test, y_test, names, owners, testers, *tokens)


def _common_tokens(parts: Mapping[str, Samples]) -> tuple[int | None, int | None]:
    """The vocabulary and the padding of all clients."""
    found = {(part.vocabulary, part.padding) for part in parts.values()}
    if len(found) > 1:
        raise InputError("clients have different vocabularies or paddings of their token ids: use the same for all.")
    return found.pop()


def _common_names(parts: Mapping[str, Samples]) -> Sequence[str] | None:
    """The names of all clients' classes; None if labels are only numbers."""
    own = [_names(part) for part in parts.values()]
    if all(each is None for each in own):
        return None
    if any(each is None for each in own):
        raise InputError("only some clients' classes have names: give names, or numbers, for all clients.")
    first = own[0]
    if all(each == first for each in own):
        return first
    return in_order({name for each in own for name in each or ()})


def _names(part: Samples) -> list[str] | None:
    if part.class_names is not None:
        return [str(each) for each in part.class_names]
    texts = [as_array(each) for each in (part.y, part.y_test) if each is not None]
    return in_order({str(v) for each in texts for v in each.flat}) if all(is_text(each) for each in texts) else None


def _by_name(y: Any, own: Sequence[str] | None, names: Sequence[str] | None) -> Any:
    """A client's labels; as names, if its classes are not numbered like everyone's."""
    if y is None or own is None or names is None or list(own) == list(names) or is_text(as_array(y)):
        return y
    return np.array(own, dtype=object)[as_array(y)]
