"""Files that are either the old one or the new one, never half of one."""

from __future__ import annotations

import os
from pathlib import Path


def write(path: Path, content: bytes | str) -> None:
    """Write beside the old file, force it to disk, and move it into place; a failure leaves the old file."""
    data = content.encode() if isinstance(content, str) else content
    beside = path.with_name(path.name + ".new")
    try:
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
