"""Adds records that came back from another machine to papers/results. The same command may be repeated.

python -m papers.collect FOLDER...
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from papers.campaign import FOLDER, read_campaign
from papers.records import RESULTS, Record, check, key_of, line_of, read_records
from polyfed.errors import InputError, PolyfedError
from polyfed.records import disk


def collect(folders: Sequence[Path], results: Path, campaign: Path = FOLDER / "campaign.yaml") -> int:
    """Merge; returns how many records are new. Nothing is written if two records of a run contradict each other."""
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"there is no folder '{folder}'.")
    known = read_records([results])
    found = read_records([results, *folders])
    check(found, read_campaign(campaign))
    by_entry: dict[str, list[Record]] = {}
    for record in sorted(found.values(), key=key_of):
        by_entry.setdefault(record["entry"], []).append(record)
    disk.make_folder(results)
    for entry, records in by_entry.items():
        disk.write(results / f"{entry}.jsonl", "".join(map(line_of, records)))
    return len(found) - len(known)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m papers.collect", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--campaign", type=Path, default=FOLDER / "campaign.yaml")
    given = parser.parse_args(arguments)
    try:
        print(f"{collect(given.folders, given.results, given.campaign)} new records")
    except PolyfedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
