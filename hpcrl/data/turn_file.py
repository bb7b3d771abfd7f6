"""The file in which a rollout worker keeps what has ended of a group that has not: turns of its samples, so that whoever generates the group
next goes on from them.

A line per turn (hpcrl/data/checked_lines.py); one that is damaged, or that a kill has cut off, is generated again. The file's name says which
group it is of and the version that the group was begun with: a line with a token of an older one counts as damaged. So the controller finds
and gives such files without reading them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from hpcrl.rundir.checked_lines import damaged, read_lines
from hpcrl.rundir.commit import children
from hpcrl.rundir.layout import Run

_NAME = re.compile(r"(?P<group>[ge][0-9-]+)\.v(?P<version>\d+)\.jsonl")


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


def read_turns(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the turns in a file, and how many of its lines are damaged; nothing where there is no such file.

    The last line is not counted: a kill may have cut it off.
    """
    name = _NAME.fullmatch(path.name)
    oldest = int(name["version"]) if name else 0
    turns = [turn if turn and min(turn["versions"]) >= oldest else None for turn in read_lines(path)]
    return [turn for turn in turns if turn is not None], damaged(turns)
