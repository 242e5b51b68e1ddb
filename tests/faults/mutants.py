"""Replies as an enemy or a broken client might send them: one of many ways to spoil a sound message, at random."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor

from polyfed.errors import BadMessage
from polyfed.message import Message
from polyfed.methods.base import Reply

Entries = dict[str, Any]

EXTREMES = (math.nan, math.inf, -math.inf, 3.4e38, -3.4e38, 1e-45, -1e-45, 1e19, -1e19, 0.0, -1.0)
COUNTS = (0, -1, 1, 25, 10**7, 10**12, 2**40, 2**53, 2**62, 2**63 - 1, -(2**63))
DTYPES = (
    torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8,
    torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float8_e8m0fnu,
)  # fmt: skip
CODES = ("F64", "F16", "BF16", "I64", "I32", "U64", "U32", "U16", "C64", "F8_E4M3", "F8_E5M2", "F4", "BOOL", "X")
"""What a header may claim a type to be."""


def mutant(reply: Reply, random: Random, largest_count: int) -> tuple[Reply, str]:
    """A spoiled copy of a reply, and in words how it was spoiled."""
    tensors: Entries = {name: tensor.clone() for name, tensor in reply.message.tensors.items()}
    metadata: Entries = {name: tensor.clone() for name, tensor in reply.message.metadata.items()}
    if random.random() < 0.25:
        return _spoiled_bytes(reply, random)
    done = []
    for _ in range(random.choice((1, 1, 1, 2))):
        kind = random.choice(tuple(MUTATIONS))
        MUTATIONS[kind](tensors, metadata, random, largest_count)
        done.append(kind)
    return Reply(reply.client, Message(tensors, metadata), random.choice((reply.loss, math.nan, 1e30))), ", ".join(done)


def _some(entries: Entries, random: Random) -> str | None:
    plain = [name for name, tensor in entries.items() if isinstance(tensor, Tensor) and tensor.layout == torch.strided]
    return random.choice(plain) if plain else None


def _change(entries: Entries, random: Random, change: Callable[[Tensor], Any]) -> None:
    name = _some(entries, random)
    if name is not None:
        entries[name] = change(entries[name])


def _dtype(tensors: Entries, metadata: Entries, random: Random, most: int) -> None:
    chosen = random.choice(DTYPES)
    entries = random.choice((tensors, metadata))
    _change(entries, random, lambda t: torch.zeros(t.shape, dtype=torch.uint8).view(chosen)
            if chosen.itemsize == 1 and chosen.is_floating_point else torch.zeros(t.shape).to(chosen))  # fmt: skip


def _shape(tensors: Entries, metadata: Entries, random: Random, most: int) -> None:
    change = random.choice(
        (
            lambda t: t.flatten(),
            lambda t: t[None],
            lambda t: t[:0] if t.dim() else t[None],
            lambda t: t.transpose(0, -1) if t.dim() else t[None],
            lambda t: torch.cat([t, t]) if t.dim() else t[None],
            lambda t: t[:1] if t.dim() else t[None],
            lambda t: torch.zeros(1000, 1000),
            lambda t: torch.zeros(1).expand(10**6, 10**6),
        )
    )
    _change(random.choice((tensors, metadata)), random, change)


def _names(tensors: Entries, metadata: Entries, random: Random, most: int) -> None:
    entries = random.choice((tensors, metadata))
    name, other = (
        _some(entries, random),
        random.choice(("", "surprise", "权重", "\ud800", "a" * 10**5, 3, "__metadata__")),
    )
    if name is None or random.random() < 0.3:
        entries[other] = torch.zeros(2)  # type: ignore[index]
    elif random.random() < 0.5:
        entries[other] = entries.pop(name)  # type: ignore[index]
    else:
        entries.pop(name)


def _foreign(tensors: Entries, metadata: Entries, random: Random, most: int) -> None:
    """What is no plain tensor, or no tensor at all."""
    make: tuple[Callable[[Tensor], Any], ...] = (
        lambda t: t.to_sparse(),
        lambda t: t.to("meta"),
        lambda t: torch.zeros(10**9, 10**6, device="meta"),
        lambda t: torch.complex(t.float(), t.float()),
        lambda t: t.tolist(),
        lambda t: None,
        lambda t: 3.0,
        lambda t: "values",
        lambda t: t.numpy(),
    )
    _change(random.choice((tensors, metadata)), random, random.choice(make))


def _value(tensors: Entries, metadata: Entries, random: Random, most: int) -> None:
    """An extreme value at one place or everywhere."""
    value, everywhere = random.choice(EXTREMES), random.random() < 0.5

    def change(tensor: Tensor) -> Tensor:
        if everywhere or not tensor.numel():
            return torch.full_like(tensor, value) if tensor.is_floating_point() else tensor
        changed = tensor.clone()
        if tensor.is_floating_point():
            changed.view(-1)[random.randrange(tensor.numel())] = value
        return changed

    _change(tensors, random, change)


def _scale(tensors: Entries, metadata: Entries, random: Random, most: int) -> None:
    """All of a message, or one tensor of it, times a large factor."""
    near = (-1.0, 5.0, -20.0, 50.0, -50.0, 90.0, -90.0)  # such a reply may just be let in
    factor = random.choice(near) if random.random() < 0.6 else 10.0 ** random.randrange(2, 39)
    chosen = list(tensors) if random.random() < 0.5 else [_some(tensors, random)]
    for name in chosen:
        if name is not None and isinstance(tensors[name], Tensor) and tensors[name].is_floating_point():
            tensors[name] = tensors[name] * factor


def _counts(tensors: Entries, metadata: Entries, random: Random, most: int) -> None:
    value = random.choice((*COUNTS, most, most + 1))
    one = random.random() < 0.5

    def change(counts: Tensor) -> Tensor:
        changed = counts.clone()
        if one and counts.numel():
            changed.view(-1)[random.randrange(counts.numel())] = value
        else:
            changed.fill_(value)
        return changed

    _change(metadata, random, change)


def _labels(tensors: Entries, metadata: Entries, random: Random, most: int) -> None:
    labels = metadata.get("labels")
    if not isinstance(labels, Tensor) or not labels.numel():
        return
    choices = (
        labels.flip(0),
        labels + 1,
        labels - 1,
        labels * 0,
        labels + 2**62,
        labels[:0],
        torch.arange(len(labels)),
    )
    metadata["labels"] = random.choice(choices)


def _all_classes(tensors: Entries, metadata: Entries, random: Random, most: int) -> None:
    """A sound message that claims to know every class."""
    if "labels" not in metadata or not isinstance(metadata["labels"], Tensor):
        return
    rows, every = len(metadata["labels"]), torch.arange(4)
    for entries in (tensors, metadata):
        for name, tensor in entries.items():
            if isinstance(tensor, Tensor) and tensor.dim() and len(tensor) == rows > 0:
                entries[name] = tensor[every % rows]
    metadata["labels"] = every


def _covariance(tensors: Entries, metadata: Entries, random: Random, most: int) -> None:
    """Covariances that no samples can have: larger than their variances allow, or just within that."""
    found = tensors.get("covariances")
    if not isinstance(found, Tensor) or found.dim() != 2 or not found.numel():
        return
    size = round((math.sqrt(8 * found.shape[1] + 1) - 1) / 2)
    rows, columns = torch.triu_indices(size, size)
    generator = torch.Generator().manual_seed(random.randrange(2**31))
    deviations = 10 ** (random.choice((0.0, 3.0, 8.0)) * -torch.rand(len(found), size, generator=generator))
    signs = torch.randint(0, 2, found.shape, generator=generator) * 2.0 - 1
    signs[:, rows == columns] = 1
    tensors["covariances"] = deviations[:, rows] * deviations[:, columns] * signs * random.choice((1.0, 1.0, 0.9))
    if random.random() < 0.3:
        tensors["covariances"][:, rows != columns] *= 10.0 ** random.randrange(1, 20)


def _other_order(tensors: Entries, metadata: Entries, random: Random, most: int) -> None:
    for entries in (tensors, metadata):
        names = list(entries)
        random.shuffle(names)
        shuffled = {name: entries[name] for name in names}
        entries.clear()
        entries.update(shuffled)


def _nothing(tensors: Entries, metadata: Entries, random: Random, most: int) -> None:
    random.choice((tensors, metadata)).clear()


def _swapped(tensors: Entries, metadata: Entries, random: Random, most: int) -> None:
    one, other = _some(tensors, random), _some(tensors, random)
    if one is not None and other is not None:
        tensors[one], tensors[other] = tensors[other], tensors[one]


MUTATIONS: dict[str, Callable[[Entries, Entries, Random, int], None]] = {
    "a type": _dtype, "a shape": _shape, "a name": _names, "no plain tensor": _foreign, "an extreme value": _value,
    "a factor": _scale, "more factors": _scale, "a count": _counts, "labels": _labels, "all classes": _all_classes,
    "covariances": _covariance, "another order": _other_order, "nothing": _nothing, "swapped": _swapped,
}  # fmt: skip


def _spoiled_bytes(reply: Reply, random: Random) -> tuple[Reply, str]:
    """The reply as it would arrive if its bytes were changed on the way."""
    data = bytearray(reply.message.to_bytes())
    kind = random.choice(("flipped bytes", "cut bytes", "added bytes", "other types in the header", "spoiled header"))
    header = 8 + int.from_bytes(data[:8], "little")
    if kind == "flipped bytes":
        for _ in range(random.choice((1, 2, 20))):
            data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    elif kind == "cut bytes":
        data = data[: random.randrange(len(data))]
    elif kind == "added bytes":
        data += random.randbytes(random.choice((1, 8, 1000)))
    elif kind == "spoiled header":
        data[random.randrange(header)] = random.randrange(256)
    else:
        data = _retyped(data, header, random)
    try:
        return Reply(reply.client, Message.from_bytes(bytes(data)), reply.loss), kind
    except BadMessage as error:
        return Reply(reply.client, Message(), failure=str(error)), kind


def _retyped(data: bytearray, header: int, random: Random) -> bytearray:
    """A header that claims other types, with shapes that fit the number of bytes where they can."""
    content = json.loads(data[8:header])
    for entry in content.values():
        if random.random() < 0.7:
            code = random.choice(CODES)
            width = next((int(n) for n in ("64", "32", "16") if n in code), 8)
            count = (entry["data_offsets"][1] - entry["data_offsets"][0]) * 8 // width
            entry["dtype"], entry["shape"] = code, [count]
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return bytearray(len(text).to_bytes(8, "little") + text + data[header:])
