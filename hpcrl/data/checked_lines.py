"""Files of JSON values that are appended, a line each with a checksum: a line that is damaged, or that a kill has cut off, is told from the
others."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hpcrl.rundir.commit import digest_of, make_directory, parse_json, read_bytes


def append_lines(path: Path, values: Iterable[Any]) -> None:
    """Append values to a file, which is made where there is none; they outlive a crash of the node from then on."""
    texts = [json.dumps(value) for value in values]
    # a kill may have cut off the last line there, which ends here
    content = "".join(f"\n{digest_of(text.encode())} {text}" for text in texts)
    make_directory(path.parent)
    with path.open("ab") as file:
        file.write(content.encode())
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: Path) -> list[Any | None]:
    """Return the values in a file, None for each that is damaged; nothing where there is no such file."""
    _, *lines = (read_bytes(path) or b"").split(b"\n")
    return [_value(line) for line in lines]


def damaged(values: list[Any | None]) -> int:
    """Return how many are None. The last one is not counted: a kill may have cut it off."""
    return values[:-1].count(None)


def _value(line: bytes) -> Any | None:
    digest, _, text = line.partition(b" ")
    return parse_json(text) if digest_of(text).encode() == digest else None
