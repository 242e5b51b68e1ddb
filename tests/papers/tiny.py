"""A campaign of two methods and three seeds on digits, and records made up for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from papers.campaign import Run, read_campaign
from papers.records import Record

TINY = """
seeds: [0, 1, 2]
front: {methods: [standalone, fedproto], entries: [tiny]}
entries:
  tiny:
    title: Digits
    recipe: fedssa-table2
    settings: [n10/cifar10]
    scale: smoke
    beside: [pfedes-table2, fedssa-table2]
    methods: [standalone, fedproto]
    changes: {eval_every: 1}
    margins: [fedproto]
"""


def record(run: Run, accuracy: float, **more: Any) -> Record:
    """A record made up: all readings are the same but for the round that is last, two points below."""
    readings = {"last": accuracy - 0.02, "last-tenth": accuracy, "best": accuracy}
    own = "classifier" if run.row == "standalone" else "prototypes"
    by_rule = dict.fromkeys([own, "classifier"], dict.fromkeys(("mean", "weighted", "participants"), readings))
    sent = {f"{name}_per_round": 4e3 for name in ("upload_bytes", "download_bytes", "flops")}
    return {
        "entry": run.entry, "setting": run.setting, "method": run.row, "seed": run.seed, "settings": run.told,
        "polyfed": "0.2", "commit": "abc", "torch": "2.15", "machine": "a GPU", "date": "2026-11-16", "seconds": 3.0,
        "accuracy": by_rule, "own_best": accuracy + 0.05, "costs": {**sent, "floats_last_round": 2e6},
        "rounds": [run.config.rounds], "curves": dict.fromkeys(by_rule, [accuracy]), **more,
    }  # fmt: skip


def written(papers: Path, made: Callable[[Run], Record | None]) -> None:
    found = [made(run) for run in read_campaign(papers / "campaign.yaml").runs()]
    text = "".join(json.dumps(each) + "\n" for each in found if each)
    (papers / "results" / "tiny.jsonl").write_text(text)
