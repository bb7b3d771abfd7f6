"""Files of appended records, one line each with a checksum (hpcrl/rundir/records.py), which exposes damaged and cut-off lines."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hpcrl.rundir.commit import LARGEST_RECORD, make_directory, read_bytes
from hpcrl.rundir.records import parse_record, with_checksum


def append_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append records to a file, which is made where there is none; they outlive a crash of the node from then on."""
    # a kill may have cut off the last line there, which ends here
    content = "".join(f"\n{with_checksum(record)[0]}" for record in records)
    make_directory(path.parent)
    with path.open("ab") as file:
        file.write(content.encode())
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: Path, most: int | None = LARGEST_RECORD) -> list[dict[str, Any] | None]:
    """Return the records in a file, None for each that is damaged; nothing where there is no such file. `most` and errors as of `read_bytes`."""
    _, *lines = (read_bytes(path, most) or b"").split(b"\n")
    return [_record(line) for line in lines]


def damaged(records: list[Any | None]) -> int:
    """Return how many are None. The last one is not counted: a kill may have cut it off."""
    return records[:-1].count(None)


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        return parse_record(line, required=True)[0]
    except ValueError:
        return None
