"""Tables about a site for its owner: the terms, the samples, what would be sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from polyfed.data import ClientData, Dataset
from polyfed.deploy.announce import Announcement
from polyfed.deploy.groups import CommonTask
from polyfed.deploy.keys import check_certificate, public_line, read_private_key
from polyfed.deploy.member import Member
from polyfed.deploy.terms import Terms
from polyfed.errors import InputError
from polyfed.ranges import typed
from polyfed.report.tables import plain_table

PARTS = ("train", "validation", "test")


def terms_table(terms: Terms) -> Table:
    """What this site agrees to, in a few lines."""
    common, config = terms.common, terms.config
    names = ", ".join(common.names[:8]) + (", …" if len(common.names) > 8 else "")
    options = ", ".join(f"{name}: {typed(value)}" for name, value in config.options.items())
    rows = [
        ["method", str(config.method["name"]) + (f" ({options})" if options else "")],
        ["rounds", str(config.rounds)],
        ["training", ", ".join(f"{name}: {typed(value)}" for name, value in config.training)],
        ["classes", f"{common.count}{f' ({names})' if names else ''}"],
        ["samples", f"{_shape(common.input_shape)}, {_kind(common)}"],
        *([["features", str(common.features)]] if common.features else []),
        *([["common network", str(found)] for found in (common.network or common.auxiliary,) if found]),
        ["members", ", ".join(terms.members)],
    ]
    return plain_table(["terms", terms.name], rows)


def _kind(common: CommonTask) -> str:
    if common.vocabulary is not None:
        return f"token ids from 0 to {common.vocabulary - 1}"
    return "pixels" if common.mean else "floats"


def samples(dataset: Dataset, data: ClientData) -> list[dict[str, Any]]:
    """How many samples of each class train, validate and test."""
    names = dataset.class_names or tuple(str(number) for number in range(dataset.classes))
    counts = [dataset.labels.cpu()[part].bincount(minlength=dataset.classes).tolist() for part in data.parts]
    return [
        {"class": name, **dict(zip(PARTS, numbers, strict=True))}
        for name, *numbers in zip(names, *counts, strict=True)
        if any(numbers)
    ]


def samples_table(counted: list[dict[str, Any]]) -> Table:
    """The same for people, with their sum."""
    rows = [[each["class"], *(str(each[part]) for part in PARTS)] for each in counted]
    total = ["all", *(str(sum(each[part] for each in counted)) for part in PARTS)]
    table = plain_table(["class", *PARTS], [*rows, total])
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def announcement_tables(found: Announcement) -> list[Table]:
    """What would be sent: when it joins, after each training, after an evaluation."""
    entries = [
        [
            entry.name,
            f"{entry.kind}{', not always' if entry.optional else ''}",
            _shape(entry.shape),
            "" if entry.trial is None else _shape(entry.trial),
            "" if entry.numbers is None else str(entry.numbers),
            "" if entry.bytes is None else str(entry.bytes),
        ]
        for entry in found.upload
    ]
    uploads = plain_table(["after training, an upload", "kind", "shape", "in the trial", "numbers", "bytes"], entries)
    for column in uploads.columns[4:]:
        column.justify = "right"
    if any(isinstance(size, str) for entry in found.upload for size in entry.shape):
        uploads.caption, uploads.caption_justify = "A name in a shape is a size that depends on the samples.", "left"
    return [
        plain_table(["when it joins", "value"], _facts(found.join)),
        uploads if entries else plain_table(["after training, no tensors"], []),
        plain_table(["beside an upload", "in the trial"], _facts(found.train)),
        plain_table(["after an evaluation", "in the trial"], _facts(found.evaluate)),
    ]


def in_words(found: Announcement) -> list[str]:
    """The same in sentences."""
    total = f"In the trial an upload had {found.upload_bytes} bytes." if found.upload else ""
    shared = {
        "scores": "Accuracies, the other scores above and losses are sent too (share: scores).",
        "nothing": "Accuracies, other scores and losses stay here (share: nothing).",
    }
    return [
        f"With {found.method} a site sends {found.sends}. {total}".rstrip(),
        found.reveals or f"{found.method} does not say what its messages reveal about the samples.",
        shared[found.share],
        "If a site can't do what it was asked, it sends a sentence that says why. Nothing else is ever sent.",
    ]


def warnings(member: Member) -> list[str]:
    """What is wrong with the files by which this site and the server know each other; a check works without them."""
    found = []
    try:
        if public_line(read_private_key(member.key)) != member.terms.members[member.name]:
            found.append(
                f"the private key '{member.key}' does not belong to the public key of '{member.name}' in the terms."
            )
    except InputError as error:
        found.append(str(error))
    try:
        check_certificate(member.settings.certificate)
    except InputError as error:
        found.append(str(error))
    return found


def _facts(facts: Mapping[str, Any], place: str = "") -> list[list[str]]:
    rows = []
    for name, value in facts.items():
        if isinstance(value, Mapping):
            rows += _facts(value, f"{place}{name}.")
        else:
            rows.append([f"{place}{name}", f"{value:.4g}" if isinstance(value, float) else typed(value)])
    return rows


def _shape(shape: tuple[int | str, ...]) -> str:
    return "×".join(str(size) for size in shape) or "1"
