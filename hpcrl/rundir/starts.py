"""Where each attempt started: checkpoints/starts.jsonl, written by the trainer's rank 0.

    {"attempt": 3, "loads": "s000040", "by": 2}     before it loads the checkpoint that attempt 2 committed
    {"attempt": 3, "from": "s000040"}               after that: training goes on; null: from the beginning
    {"attempt": 3, "removed": ["s000040"]}          a person deleted these after attempt 3, though the run would have needed them

The first line without the second is a load that did not come to its end. A checkpoint of attempt 2 that lies after s000040 and appears
once attempt 3 has started there belongs to a line of training that was given up.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcrl.rundir.commit import make_directory, parse_json, read_bytes
from hpcrl.rundir.layout import Run, position_of
from hpcrl.rundir.ledger import Outcome, outcome_of
from hpcrl.rundir.records import damaged

Line = dict[str, Any]

_FAULTS = ("failed", "hang")  # an attempt that was preempted or lost is no evidence against what it loaded
_TRAINER = re.compile(r"(?:trainer|rank)-\d+\b")  # how agents begin what they report of the trainer's own processes
_REFUSED = re.compile(r"\bRunError: ")  # the run cannot go on as it is configured


def note(run: Run, line: Line) -> None:
    """Append one line, whole also after one that was cut off."""
    make_directory(run.starts.parent)
    with run.starts.open("ab+") as file:
        if file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
            file.write(b"\n")
        file.write(json.dumps(line).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read_starts(run: Run) -> list[Line]:
    """Return all lines, oldest first; one that was cut off is ignored.

    Raises:
        RunError: a line is JSON, but none of these.
    """
    lines = []
    for number, line in enumerate((read_bytes(run.starts) or b"").splitlines(), 1):
        try:
            value = parse_json(line)
        except ValueError:
            continue
        if not _is_line(value):
            raise damaged(f"{run.starts}, line {number},", f"found {value!r:.80}", "delete that line")
        lines.append(value)
    return lines


def _is_line(value: Any) -> bool:
    if not isinstance(value, dict) or type(value.get("attempt")) is not int:
        return False
    return isinstance(value.get("from"), str | None) and isinstance(value.get("loads", ""), str)


def last_started(lines: Sequence[Line]) -> int:
    """Return the newest attempt that got as far as training, or 0."""
    return max((line["attempt"] for line in lines if "from" in line), default=0)


def resumed_after(lines: Sequence[Line]) -> dict[int, int]:
    """Return by attempt the step after which it went on training."""
    begun = {line["attempt"]: line["from"] for line in lines if "from" in line}
    return {attempt: (position_of(Path(name)) or (0, 0))[0] if name else 0 for attempt, name in begun.items()}


def failed_loads(run: Run, lines: Sequence[Line]) -> dict[tuple[str, int | None], list[int]]:
    """Return by checkpoint (name, attempt that committed it) the attempts whose trainer failed or hung while it loaded that one.

    Only those count that came after the last one that got as far as training.
    """
    found = dict[tuple[str, int | None], list[int]]()
    for line in lines:
        if "loads" in line and line["attempt"] > last_started(lines) and _failed(outcome_of(run, line["attempt"])):
            found.setdefault((line["loads"], line.get("by")), []).append(line["attempt"])
    return found


def _failed(outcome: Outcome | None) -> bool:
    """Return whether it may be what was loaded that the trainer failed of."""
    return (
        outcome is not None
        and outcome.kind in _FAULTS
        and _TRAINER.match(outcome.message) is not None
        and _REFUSED.search(outcome.message) is None
    )


def given_up_by(lines: Sequence[Line], path: Path, by: int) -> int | None:
    """Return the later attempt that started before what attempt `by` committed at `path`, which that gave up; None: none did."""
    position = position_of(path)
    for line in lines:
        start = position_of(Path(line["from"])) if line.get("from") else (0, 0)
        if "from" in line and line["attempt"] > by and start is not None and position is not None and start < position:
            return line["attempt"]
    return None
