"""Adds new records to papers/results, from the folders that `papers.run --out` wrote. It may be repeated.

python -m papers.collect FOLDER...
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from papers.campaign import FOLDER, read_campaign
from papers.records import RESULTS, check, key_of, line_of, read_records
from polyfed.errors import InputError, PolyfedError
from polyfed.records import disk


def collect(folders: Sequence[Path], results: Path = RESULTS, campaign: Path = FOLDER / "campaign.yaml") -> int:
    """Add the records of these folders, and return how many are new.

    Nothing is written if two records of the same run differ.
    """
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"there is no folder '{folder}': name the one that papers.run wrote to (--out).")
    known, found = read_records([results]), read_records([results, *folders])
    check(found, read_campaign(campaign))
    records = sorted(found.values(), key=key_of)
    disk.make_folder(results)
    for entry in {record["entry"] for record in records}:
        lines = [line_of(record) for record in records if record["entry"] == entry]
        disk.write(results / f"{entry}.jsonl", "".join(lines))
    return len(found) - len(known)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: one sentence and exit status 2 for wrong input."""
    parser = argparse.ArgumentParser(prog="python -m papers.collect", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="what --out of papers.run named")
    try:
        print(f"{collect(parser.parse_args(arguments).folders)} new records")
    except PolyfedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
