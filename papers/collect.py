"""Adds records that came back from another machine to papers/results. The same command may be repeated.

python -m papers.collect FOLDER...
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from papers.campaign import FOLDER, read_campaign
from papers.records import RESULTS, check, key_of, line_of, read_records
from polyfed.errors import InputError, PolyfedError
from polyfed.records import disk


def collect(folders: Sequence[Path], results: Path = RESULTS, campaign: Path = FOLDER / "campaign.yaml") -> int:
    """Merge; returns how many records are new. Nothing is written if two records of a run contradict each other."""
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"there is no folder '{folder}': name the one that --out of the runs named.")
    known, found = read_records([results]), read_records([results, *folders])
    check(found, read_campaign(campaign))
    records = sorted(found.values(), key=key_of)
    disk.make_folder(results)
    for entry in {record["entry"] for record in records}:
        lines = [line_of(record) for record in records if record["entry"] == entry]
        disk.write(results / f"{entry}.jsonl", "".join(lines))
    return len(found) - len(known)


if __name__ == "__main__":
    try:
        print(f"{collect([Path(name) for name in sys.argv[1:]])} new records")
    except PolyfedError as error:
        sys.exit(f"error: {error}")
