"""Where each attempt started: checkpoints/starts.jsonl, written by the trainer's rank 0.

    {"attempt": 3, "loads": "s000040", "by": 2}     before it loads the checkpoint that attempt 2 committed
    {"attempt": 3, "from": "s000040"}               after that: training goes on; null: from the beginning

The first line without the second is a load that did not come to its end. A checkpoint of attempt 2 that lies after s000040 and appears
once attempt 3 has started there belongs to a line of training that was given up.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from hpcrl.run.layout import Run, position_of
from hpcrl.run.ledger import outcome_of

_FAULTS = ("failed", "hang")  # an attempt that was preempted or lost says nothing about what it loaded


def note(run: Run, line: dict[str, Any]) -> None:
    """Append one line, whole also after one that was cut off."""
    run.starts.parent.mkdir(parents=True, exist_ok=True)
    with run.starts.open("ab+") as file:
        if file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
            file.write(b"\n")
        file.write(json.dumps(line).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read_starts(run: Run) -> list[dict[str, Any]]:
    """Return all lines, oldest first; one that was cut off is ignored."""
    lines = []
    for line in run.starts.read_bytes().splitlines() if run.starts.is_file() else []:
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return lines


def failed_loads(run: Run, name: str, by: int | None) -> list[int]:
    """Return the attempts that failed or hung while they loaded the checkpoint `name` that attempt `by` committed."""
    lines = read_starts(run)
    started = {line["attempt"] for line in lines if "from" in line}
    tried = {line["attempt"] for line in lines if line.get("loads") == name and line.get("by") == by}
    return [
        attempt
        for attempt in sorted(tried - started)
        if (outcome := outcome_of(run, attempt)) and outcome.kind in _FAULTS
    ]


def given_up_by(run: Run, path: Path, by: int) -> int | None:
    """Return the later attempt that started before what attempt `by` committed at `path`, which that gave up; None: none did."""
    position = position_of(path)
    for line in read_starts(run):
        start = position_of(Path(line["from"])) if line.get("from") else (0, 0)
        if "from" in line and line["attempt"] > by and start is not None and position is not None and start < position:
            return line["attempt"]
    return None
