"""What a reader needs beside figures: what travelled, settings, versions, commands, notes."""

from __future__ import annotations

import math
import shlex
from typing import Any

from polyfed.methods import METHODS
from polyfed.ranges import typed
from polyfed.records.claim import resume_command
from polyfed.report import html
from polyfed.report.data import Material, Run
from polyfed.report.summary import quantity

METADATA = "metadata."


def traffic(material: Material) -> str:
    """What each method sends, how much, and what it reveals."""
    rows = [[run.name, *_described(run), *_per_message(run)] for run in material.first_runs]
    header = ["method", "sends", "what a message reveals", "up", "down"]
    caption = "By participant: bytes (floats) in the last round. What a message reveals is a reading, not a proof."
    wide = html.table(header, rows, caption)
    blocks = [f'<div class="words">{wide}</div>']
    for run in material.first_runs:
        entries = _entries(run)
        if entries:
            caption = f"Messages of one client of {run.name}, seed {run.seed}, in round {entries[0]}"
            table = html.table(["name", "direction", "shape", "bytes"], entries[1], caption)
            blocks.append(html.details(f"Messages of {run.name}", table))
        elif any(event.get("upload_bytes") for event in run.events):
            blocks.append(html.paragraph(f"{run.name} did not record the names and shapes of its messages."))
    return "".join(blocks)


def _described(run: Run) -> tuple[str, str]:
    if run.method not in METHODS:
        return "not known here", "not known here"
    return METHODS[run.method].sends, METHODS[run.method].reveals or "the method does not say"


def _per_message(run: Run) -> tuple[str, str]:
    rounds = [event for event in run.events if event["event"] == "round"]
    if not rounds:
        return "–", "–"
    last, count = rounds[-1], max(1, rounds[-1].get("participants") or 1)
    up, down = (
        f"{quantity(last[f'{way}_bytes'] / count)}B ({quantity(last[f'{way}_floats'] / count).strip()})"
        for way in ("upload", "download")
    )
    return up, down


def _entries(run: Run) -> tuple[int, list[list[Any]]] | None:
    """The last recorded round with messages, and a row per entry."""
    recorded = [event for event in run.events if event.get("messages")]
    if not recorded:
        return None
    messages = recorded[-1]["messages"]
    rows = [
        [name.removeprefix(METADATA), way, "×".join(map(str, shape)) or "one number",
         math.prod(shape) * (8 if name.startswith(METADATA) else 4)]
        for way in ("down", "up") for name, shape in messages[way].items()
    ]  # fmt: skip
    return (recorded[-1]["round"], rows) if rows else None


def about_runs(material: Material) -> str:
    """Settings, versions and machines, commands, notes."""
    runs = material.runs
    names = list(dict.fromkeys(name for run in runs for name in run.settings))
    values = {name: {typed(run.settings.get(name)) for run in runs} for name in names}
    common = [[name, found.pop()] for name, found in values.items() if len(found) == 1]
    other = [name for name in names if len({typed(run.settings.get(name)) for run in runs}) > 1 and name != "seed"]
    blocks = [
        html.details("Settings that all runs share", html.table(["setting", "value"], common, "Shared settings")),
        _differing(material, other),
        html.listed(sorted({run.folder.origin() for run in runs})),
        html.details("Commands to run everything again", html.code([_command(run) for run in runs])),
        _notes(material),
    ]
    return "".join(blocks)


def _differing(material: Material, names: list[str]) -> str:
    if not names:
        return ""
    rows = [
        [run.name, ", ".join(f"{n} {typed(run.settings[n])}" for n in names if n in run.settings)]
        for run in material.first_runs
    ]
    table = html.table(["method", "settings"], rows, "Settings in which runs differ, besides the seed")
    return html.details("Settings in which runs differ", f'<div class="words">{table}</div>')


def _command(run: Run) -> str:
    resume = resume_command(run.path)
    if not run.folder.finished:
        return resume
    trust = " --trust" if resume.endswith(" --trust") else ""
    return f"polyfed run {shlex.quote(str(run.path / 'config.yaml'))}{trust}"


def _notes(material: Material) -> str:
    """Notes of all runs, equal ones together, and replies that were left out."""
    refused: list[list[Any]] = []
    notes: dict[str, list[str]] = {}
    for run in material.runs:
        for event in run.events:
            if event["event"] != "note":
                continue
            if "client" in event:
                refused.append([run.name, run.seed, event.get("round"), event["client"], event.get("note", "")])
            else:
                notes.setdefault(str(event.get("note", "")), []).append(f"{run.name} (seed {run.seed})")
    told = [[note, len(who), ", ".join(list(dict.fromkeys(who))[:3])] for note, who in notes.items()]
    blocks = [
        html.table(["note", "times", "runs, the first three"], told, "Notes of the runs") if told else "",
        html.table(["method", "seed", "round", "client", "why"], refused, "Replies that were left out")
        if refused
        else html.paragraph("No reply was left out."),
    ]
    return f'<div class="words">{"".join(blocks)}</div>'
