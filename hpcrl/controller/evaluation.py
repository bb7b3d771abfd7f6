"""Evaluation: its schedule, its work and its queue. Finished rows on disk count in the next attempt too, until the summary is written."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from hpcrl.data.cache_files import EvalRow, read_rows
from hpcrl.data.weight_files import PublishedWeights
from hpcrl.errors import CommitError
from hpcrl.rundir.commit import children, digest_of, discard, is_committed, write_json
from hpcrl.rundir.layout import Run, version_of
from hpcrl.types import GroupMeta, Prompt, Work

EVAL_GROUP = r"e(?:\d{6}|[1-9]\d{6,14})-(?:\d{8}|[1-9]\d{8,14})"
"""What ids of evaluated groups look like."""


def eval_is_due(version: int, total_steps: int, interval: int, before_train: bool) -> bool:
    """Return whether the policy `version` is to be evaluated: before training, every `interval` steps, and at the end."""
    if interval <= 0:
        return False
    if version == 0:
        return before_train
    return version % interval == 0 or version == total_steps


def eval_group_id(version: int, row: int) -> str:
    """Return the group id of a row of the validation set, evaluated with the policy `version`."""
    return f"{eval_prefix(version)}{row:08d}"


def eval_prefix(version: int) -> str:
    """Return how the ids of all groups of an evaluation begin."""
    return f"e{version:06d}-"


def evaluation_work(
    prompts: Sequence[Prompt],
    version: int,
    n_samples: int,
    seed: int,
    rows: Sequence[int] | None = None,
    settings: str | None = None,
) -> list[Work]:
    """Return the work of evaluating `rows` of a validation set, all where None.

    Ids and seeds depend on row, version and `seed` alone, so that an evaluation outside of training generates the
    same groups as that of the run.

    Args:
        settings: all that responses and scores depend on, where rows that are finished may count in a later attempt.
    """

    def of_row(row: int) -> Work:
        name, prompt = eval_group_id(version, row), prompts[row]
        decides = [settings, name, vars(prompt), n_samples, seed + row]
        asked = "" if settings is None else digest_of(json.dumps(decides).encode())
        return Work(name, "eval", prompt, n_samples, seed + row, asked=asked)

    return [of_row(row) for row in (range(len(prompts)) if rows is None else rows)]


class EvalQueue:
    """The evaluation of one version at a time: rows that wait, run and are finished.

    Args:
        at_once: rows that run at the same time at most.
    """

    def __init__(self, at_once: int) -> None:
        self.version, self._at_once = 0, at_once
        self._waiting: deque[int] = deque()
        self._running: dict[str, tuple[int, str]] = {}
        self._running_at = Counter[str]()
        self._finished: dict[str, GroupMeta] = {}

    @property
    def open(self) -> int:
        return len(self._waiting) + len(self._running)

    @property
    def room(self) -> int:
        """Rows that may begin now."""
        return min(len(self._waiting), self._at_once - len(self._running))

    def begin(self, version: int, rows: int, finished: Mapping[str, GroupMeta] | None = None) -> None:
        """Begin with so many rows.

        Args:
            finished: rows that an earlier attempt has finished, by their names.
        """
        assert not self.open, f"version {self.version} is still being evaluated"
        self.version, self._finished = version, dict(finished or {})
        self._waiting = deque(row for row in range(rows) if eval_group_id(version, row) not in self._finished)

    def claim(self, worker: str, version: int, count: int) -> list[int]:
        if version < self.version:
            return []
        rows = [self._waiting.popleft() for _ in range(min(count, self.room))]
        self._running.update({eval_group_id(self.version, row): (row, worker) for row in rows})
        self._running_at[worker] += len(rows)
        return rows

    def complete(self, meta: GroupMeta) -> str | None:
        if meta.group_id not in self._running:
            return "not asked for"
        self._end(meta.group_id)
        self._finished[meta.group_id] = meta
        return None

    def running_at(self, worker: str) -> int:
        return self._running_at[worker]

    def worker_of(self, name: str) -> str | None:
        """Return the worker that evaluates a row, or None."""
        return self._running[name][1] if name in self._running else None

    def row_of(self, name: str) -> int | None:
        """Return the row that a group evaluates, or None where nobody evaluates it."""
        return self._running[name][0] if name in self._running else None

    def release(self, worker: str, holding: Collection[str] = ()) -> list[str]:
        """Take back the rows of a worker that is gone, or that an answer lost; return their names."""
        if not self._running_at[worker]:
            return []
        lost = [name for name, (_, owner) in self._running.items() if owner == worker and name not in holding]
        self._waiting.extend(self._end(name) for name in lost)
        return lost

    def _end(self, name: str) -> int:
        row, worker = self._running.pop(name)
        self._running_at[worker] -= 1
        return row

    def conclude(self) -> list[GroupMeta] | None:
        """Return the groups once all are finished, and only once."""
        if self.open or not self._finished:
            return None
        groups = [self._finished[name] for name in sorted(self._finished)]
        self._finished = {}
        return groups


def is_evaluated(run: Run, version: int) -> bool:
    return run.eval_summary(version).exists()


def discard_after(run: Run, step: int) -> None:
    """Remove evaluations of versions that will be trained again."""
    for path in run.evals.glob("v*"):
        if (version_of(path) or 0) > step:
            discard(path)


def write_summary(run: Run, version: int, metrics: Mapping[str, float]) -> None:
    """Write the scores, and remove the rows."""
    write_json(run.eval_summary(version), metrics)
    for path in _row_files(run, version):
        path.unlink(missing_ok=True)


def finished_rows(run: Run, version: int, work: Iterable[Work]) -> dict[str, GroupMeta]:
    """Return which rows of an evaluation that is not over are finished, by their names.

    None are where one had other settings, or was generated with other weights than those of `version`: then the files are of another
    evaluation. Where none are, all of it is removed.

    Args:
        work: of all rows; looked at only where some are finished.
    """
    kept = [row for path in _row_files(run, version) for row in _read(path)]
    if kept:
        asked, weights = {item.group_id: item.asked for item in work}, _digest(run, version)
        expected = {name: (what, weights, version, version) for name, what in asked.items()}
        if all(_known(row) == expected.get(row.group.group_id) for row in kept):
            finished = {row.group.group_id: row.group for row in kept}
            print(f"version {version}: {len(finished)} of {len(asked)} rows were evaluated before", flush=True)
            return finished
        print(f"version {version} is evaluated again: it was with other settings, prompts or weights", flush=True)
    discard(run.evals_of(version))
    return {}


def _known(row: EvalRow) -> tuple[str, str, int, int]:
    return row.asked, row.weights, row.group.oldest_version, row.group.newest_version


def _row_files(run: Run, version: int) -> list[Path]:
    folder = run.evals_of(version)
    return [folder / name for name in sorted(children(folder)) if name.endswith(".rows")]


def _read(path: Path) -> list[EvalRow]:
    rows, damaged = read_rows(path)
    if damaged:
        print(f"{path}: {damaged} of its lines are damaged; these rows are generated again", flush=True)
    return rows


def _digest(run: Run, version: int) -> str | None:
    """Return that of the weights that are published as `version`, as `EvalRow` has it; None where they cannot be read."""
    try:
        published = run.weights_of(version)  # version 0 is not, where it is the initial model
        return PublishedWeights.read(published).digest if version or is_committed(published) else ""
    except CommitError as error:
        print(error, flush=True)
        return None
