"""Records that only grow, row by row; a checkpoint notes how much of each it relies on.

A checkpoint holds a record's extent: its rows, its bytes and a hash of them. Resuming cuts the record back to exactly
that. A second copy lies beside the checkpoint and grows with it. A record that was cut off, deleted or garbled
meanwhile is restored from there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from polyfed.records import disk


@dataclass(frozen=True)
class Extent:
    """How much of a record is meant."""

    rows: int
    length: int
    hash: str

    def of(self, content: bytes | None) -> bytes | None:
        """That part of a content, or None if it is not there unchanged."""
        if content is None or digest(content[: self.length]) != self.hash:
            return None
        return content[: self.length]


def digest(data: bytes) -> str:
    """A short hash that tells damaged bytes from intact ones."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


class Log:
    """One record of a run: rounds.csv, evaluations.csv or events.jsonl."""

    def __init__(
        self,
        path: Path,
        copy: Path,
        header: str,
        fits: Callable[[str, int], bool],
        keeps: Callable[[str], bool] = lambda line: False,
    ) -> None:
        """`fits` says whether a line looks like a complete row of a round up to the given one.

        `keeps` says which of these rows stay when the record is cut back to an earlier extent.
        """
        self.path = path
        self._copy = copy
        self._header = header.encode()
        self._fits = fits
        self._keeps = keeps
        self._begin(self._header, copied=0)

    def create(self) -> None:
        """Write the record with only its header."""
        disk.write(self.path, self._header, sync_name=False)

    def append(self, text: str) -> None:
        """Add rows; they are durable after the next `sync`."""
        data = text.encode()
        disk.append(self.path, data)
        self._hash.update(data)
        self._bytes += len(data)
        self._rows += data.count(b"\n")
        self._uncopied += data

    def sync(self, *, copy: bool = True) -> Extent:
        """Force all rows to disk, in the record and in its copy, and return its extent."""
        if disk.is_file(self.path):  # if someone deleted it, there is still the copy
            disk.sync(self.path)
        if copy:
            disk.append(self._copy, bytes(self._uncopied), sync=True)
            self._uncopied.clear()
        return Extent(self._rows, self._bytes, self._hash.hexdigest())

    def cut(self, extent: Extent | None, round: int) -> str:
        """Go back to an extent, or to only the header; returns what was wrong with the record, if anything."""
        found, copy = disk.read(self.path), disk.read(self._copy)
        whole, problem = (self._header, "") if extent is None else self._whole(extent, found, copy, round)
        beyond = found[len(whole) :] if found is not None and found.startswith(whole) else b""
        content = whole + self._rows_of(beyond, round, self._keeps)
        if content != found:
            disk.write(self.path, content)
        if copy is not None and copy != whole:
            disk.write(self._copy, whole)
        self._begin(content, copied=0 if copy is None else len(whole))
        return problem

    def _whole(self, extent: Extent, found: bytes | None, copy: bytes | None, round: int) -> tuple[bytes, str]:
        """As much of the extent as there is, and what was wrong."""
        name, of_record, of_copy = self.path.name, extent.of(found), extent.of(copy)
        if of_record is not None:
            return of_record, ""
        if of_copy is not None:
            return of_copy, f"{name} was damaged or incomplete and has been restored from its copy in the checkpoint"
        saved = max((self._header + self._rows_of(content or b"", round) for content in (found, copy)), key=len)
        headers = self._header.count(b"\n")
        return saved, (
            f"{name} and its copy in the checkpoint are damaged: {saved.count(10) - headers} of "
            f"{extent.rows - headers} rows could be saved"
        )

    def _rows_of(self, content: bytes, round: int, wanted: Callable[[str], bool] = lambda line: True) -> bytes:
        """The lines that look like complete rows."""
        lines = [line for line in _lines(content) if self._fits(line, round) and wanted(line)]
        return "".join(line + "\n" for line in lines).encode()

    def _begin(self, content: bytes, *, copied: int) -> None:
        self._hash = hashlib.blake2b(content, digest_size=16)
        self._bytes, self._rows = len(content), content.count(b"\n")
        self._uncopied = bytearray(content[copied:])

    def has(self, extent: Extent) -> bool:
        """Whether the record still starts with that extent."""
        return extent.of(disk.read(self.path)) is not None

    def damage(self, extent: Extent) -> str:
        """What is wrong with the record of a finished run, or nothing."""
        found = disk.read(self.path)
        if found is None:
            return f"{self.path.name} is missing"
        if extent.of(found) is None or len(found) != extent.length:
            rows = extent.rows - self._header.count(10)
            return f"{self.path.name} has changed since the run ended, with {rows} rows then"
        return ""


def _lines(content: bytes) -> list[str]:
    """The lines that are text and have an end."""
    lines = []
    for line in content.split(b"\n")[:-1]:
        try:
            lines.append(line.decode())
        except UnicodeDecodeError:
            continue
    return lines
