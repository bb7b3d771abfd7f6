"""The file in which a rollout worker keeps the rows of an evaluation that it has finished, so that the next attempt does not generate them
again. It is needed until the evaluation has its summary.

A line per row (hpcrl/data/checked_lines.py), with what the row depends on: who reads it compares that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrl.rundir.checked_lines import append_lines, damaged, read_lines
from hpcrl.types import GroupMeta


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
    rows = [_row(line) for line in read_lines(path)]
    return [row for row in rows if row is not None], damaged(rows)


def _row(line: dict[str, Any] | None) -> EvalRow | None:
    try:
        return EvalRow(GroupMeta.from_json(line["group"]), line["asked"], line["weights"]) if line else None
    except (TypeError, ValueError, KeyError):  # of another version of hpcrl
        return None
