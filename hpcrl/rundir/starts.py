"""Records the checkpoint at which each attempt started: checkpoints/starts.jsonl, written by the trainer's rank 0.

    {"attempt": 3, "loads": "s000040", "by": 2}     before it loads the checkpoint that attempt 2 committed
    {"attempt": 3, "from": "s000040"}               after that: training goes on; null: from the beginning
    {"attempt": 3, "removed": ["s000040"]}          a person deleted these after attempt 3, though the run would have needed them.
    {"attempt": 3, "kept": ["s000040"], "step": 40} all others were deleted after the end, at step 40

The first line without the second is a load that did not come to its end. A checkpoint of attempt 2 that lies after s000040 and appears
once attempt 3 has started there belongs to a line of training that was given up.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcrl.errors import CommitError, RunError
from hpcrl.rundir.commit import committed, committed_by, verify
from hpcrl.rundir.layout import Run, position_of
from hpcrl.rundir.ledger import Outcome, outcome_of
from hpcrl.rundir.records import append_text, damaged, parse_line, whole_lines, with_checksum

Line = dict[str, Any]

_DELETE = "delete that line"
_FAULTS = ("failed", "hang")  # an attempt that was preempted or lost is no evidence against what it loaded
_TRAINER = re.compile(r"(?:trainer|rank)-\d+\b")  # how agents begin what they report of the trainer's own processes
_REFUSED = re.compile(r"\bRunError: ")  # the run cannot go on as it is configured


def note(run: Run, line: Line) -> None:
    """Append one line, whole also after one that was cut off."""
    append_text(run.starts, with_checksum(line)[0] + "\n")


def read_starts(run: Run) -> list[Line]:
    """Return all lines, oldest first; one that was cut off is ignored."""
    return [parse_start(place, line) for place, line in whole_lines(run.starts)]


def parse_start(place: str, line: bytes) -> Line:
    """Return the start of a line of starts.jsonl."""
    value = parse_line(place, line, _DELETE)
    if not _is_line(value):
        raise damaged(place, f"found {value!r:.80}", _DELETE)
    return value


def require_starts(run: Run) -> None:
    """Require a recorded start of each attempt that committed a checkpoint: checkpoints that a later one gave up must not be used.

    Raises:
        RunError: one is not, or a line is damaged.
    """
    paths = [run.checkpoint(*at) for at in committed(run.checkpoints, position_of)]
    begun, before = {line["attempt"] for line in read_starts(run) if "from" in line}, dict[str, int]()
    for path in paths:
        by = committed_by(path)
        if by is not None and by not in begun and _is_marked_by(path, by):
            start = next((name for name, other in reversed(before.items()) if other < by), None)
            line = json.dumps({"attempt": by, "from": start})
            raise RunError(
                f"{run.starts} does not know where attempt {by} started, which committed {path.name}. Restore it from a backup, or, if it "
                f"went on from {start or 'the beginning'}, write that down: echo '{line}' >> {shlex.quote(str(run.starts))}"
            )
        if by is not None:
            before[path.name] = by


def _is_marked_by(path: Path, by: int) -> bool:
    """Return whether attempt `by` committed the checkpoint; readers skip one with a damaged mark."""
    try:
        return verify(path, checksums=False)["attempt"] == by
    except CommitError:
        return False


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
