"""Caches of rollout workers: finished turns of unfinished groups, and finished rows of unfinished evaluations.

A file has a line per turn and per answer of an environment to one, or per row (hpcrl/rundir/checked_lines.py); damaged and cut-off ones are
generated, or asked for, again.

The next worker that generates the group continues from its turns. The file's name has the group and the version with which the group began;
a line with a token of an older version counts as damaged. So the controller assigns such files without reading them.

The next attempt does not generate cached rows of an evaluation again, until the evaluation has its summary. A line has the facts on which its
row depends, and readers compare them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hpcrl.rundir.checked_lines import append_lines, damaged, read_lines
from hpcrl.rundir.commit import children, read_bytes
from hpcrl.rundir.layout import Run
from hpcrl.types import GroupMeta

_NAME = re.compile(r"(?P<group>[ge][0-9-]+)\.v(?P<version>\d+)\.jsonl")
_SHA256 = re.compile(rb"\b[0-9a-f]{64}\b")


def turn_file(run: Run, worker: str, group_id: str, version: int) -> Path:
    """Return where `worker` keeps the turns of a group that it begins with `version`."""
    return run.turns_of(worker) / f"{group_id}.v{version}.jsonl"


def turn_files(run: Run, worker: str | None = None) -> dict[str, dict[Path, int]]:
    """Return the files that `worker` has kept, those of all workers if unset: for each group the files, each with its version."""
    found = defaultdict[str, dict[Path, int]](dict)
    for folder in children(run.turns) if worker is None else [worker]:
        for name in children(run.turns_of(folder)):
            if match := _NAME.fullmatch(name):
                found[match["group"]][run.turns_of(folder) / name] = int(match["version"])
    return dict(found)


class KeptTurns(NamedTuple):
    """What a file of turns has.

    Attributes:
        turns: of the policy.
        answers: of environments.
        damaged: how many of its lines are damaged; the last one is not counted, as a kill may have cut it off.
    """

    turns: list[dict[str, Any]]
    answers: list[dict[str, Any]]
    damaged: int


def read_turns(path: Path) -> KeptTurns:
    """Return what a file of turns has; nothing where there is no such file."""
    name = _NAME.fullmatch(path.name)
    oldest = int(name["version"]) if name else 0
    lines = [
        line if line and min(line.get("versions", [oldest])) >= oldest else None for line in read_lines(path, most=None)
    ]
    whole = [line for line in lines if line is not None]
    return KeptTurns(
        [line for line in whole if "turn" in line], [line for line in whole if "answer" in line], damaged(lines)
    )


def named_digests(run: Run) -> set[str]:
    """Return the SHA-256 digests in the files of turns, such as those of snapshots in the states of environments."""
    files = [path for found in turn_files(run).values() for path in found]
    return {digest.decode() for path in files for digest in _SHA256.findall(read_bytes(path, None) or b"")}


@dataclass(frozen=True)
class EvalRow:
    """A finished row.

    Attributes:
        asked: that of its work (hpcrl/types.py).
        weights: digest of the version that the engine was proven to hold; empty for version 0, the model that it loads itself.
    """

    group: GroupMeta
    asked: str
    weights: str


def append_rows(path: Path, rows: Iterable[EvalRow]) -> None:
    """Append rows; they outlive a crash of the node from then on."""
    append_lines(path, ({"asked": row.asked, "weights": row.weights, "group": row.group.to_json()} for row in rows))


def read_rows(path: Path) -> tuple[list[EvalRow], int]:
    """Return the rows in a file, and how many of its lines are damaged; nothing where there is no such file.

    The last line is not counted: a kill may have cut it off.
    """
    rows = [_row(line) for line in read_lines(path, most=None)]
    return [row for row in rows if row is not None], damaged(rows)


def _row(line: dict[str, Any] | None) -> EvalRow | None:
    try:
        return EvalRow(GroupMeta.from_json(line["group"]), line["asked"], line["weights"]) if line else None
    except (TypeError, ValueError, KeyError):  # of another version of hpcrl
        return None
