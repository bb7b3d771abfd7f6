"""Evaluation: its schedule, its work and its queue. Finished rows on disk count in the next attempt too, until the summary is written.

An evaluation does not stop training. Its rows begin on workers without training groups, and first of all on those whose engines are to
load a newer version. A worker keeps its version until the rows that it has taken are finished and none wait. Rows of a lost worker wait
for an engine that has yet to load their version, such as that of the worker's next start. An engine that serves several versions, each an
adapter, goes on to the newest and evaluates any beside it.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from hpcrl.data.cache_files import EvalRow
from hpcrl.data.weight_files import PublishedWeights
from hpcrl.errors import CommitError
from hpcrl.observe.conclude import read_finished, row_files
from hpcrl.rundir.commit import digest_of, discard, is_committed, write_json
from hpcrl.rundir.evaluations import (
    MOST_OPEN,
    discard_rows,
)
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


def _row_of(name: str) -> int:
    return int(name.partition("-")[2])


@dataclass(frozen=True)
class _Running:
    """A row that is being evaluated."""

    worker: str
    version: int
    row: int


class EvalQueue:
    """The evaluations that are open, each of one version: rows that wait, run and are finished.

    Args:
        at_once: rows that run at the same time at most.
        most_open: evaluations that may be open while training goes on.
    """

    def __init__(self, at_once: int, most_open: int = MOST_OPEN) -> None:
        self._at_once, self._most_open = at_once, most_open
        self._waiting: dict[int, deque[int]] = {}
        self._running: dict[str, _Running] = {}
        self._running_at, self._running_of = Counter[str](), Counter[int]()
        self._finished: dict[int, dict[str, GroupMeta]] = {}

    @property
    def versions(self) -> list[int]:
        """The versions whose evaluations are open, in the order in which they began."""
        return list(self._waiting)

    @property
    def open(self) -> int:
        """Rows that are not finished."""
        return sum(map(len, self._waiting.values())) + len(self._running)

    @property
    def full(self) -> bool:
        """Whether training waits, since so many evaluations are open."""
        return len(self._waiting) >= self._most_open

    def open_of(self, version: int) -> int:
        """Return the rows of an evaluation that are not finished."""
        return len(self._waiting.get(version, ())) + self._running_of[version]

    def room(self, version: int | None = None) -> int:
        """Return the rows of a version, or of all, that may begin now."""
        waiting = self._waiting.values() if version is None else [self._waiting.get(version, ())]
        return min(sum(map(len, waiting)), self._at_once - len(self._running))

    def begin(self, version: int, rows: int, finished: Mapping[str, GroupMeta] | None = None) -> None:
        """Open the evaluation of a version with so many rows.

        Args:
            finished: rows that an earlier attempt has finished, by their names.
        """
        assert version not in self._waiting, f"version {version} is being evaluated"
        self._finished[version] = dict(finished or {})
        left = (row for row in range(rows) if eval_group_id(version, row) not in self._finished[version])
        self._waiting[version] = deque(left)

    def wanted(self, held: int, newest: int, *, goes_back: bool = False, stays: bool = False) -> int:
        """Return the version that an engine with version `held` should have next, for its rows or as the newest.

        Args:
            goes_back: whether it may be an older one.
            stays: whether the engine keeps a version as long as its evaluation is open, also where all rows run elsewhere.
        """
        if held in self._waiting and (self._waiting[held] or stays):
            return held
        waiting = [version for version, rows in self._waiting.items() if rows and (version > held or goes_back)]
        return min(waiting, default=newest)

    def claim(self, worker: str, version: int, count: int) -> list[int]:
        """Return up to `count` rows that `worker`, whose engine holds `version`, may begin now."""
        rows = list(islice(self._waiting.get(version, ()), max(0, min(count, self.room(version)))))
        for row in rows:
            self._begin(worker, version, row)
        return rows

    def complete(self, meta: GroupMeta) -> str | None:
        if meta.group_id not in self._running:
            return "not asked for"
        self._finished[self._end(meta.group_id).version][meta.group_id] = meta
        return None

    @property
    def workers(self) -> list[str]:
        """Workers that evaluate rows."""
        return [worker for worker, rows in self._running_at.items() if rows]

    def running_at(self, worker: str) -> int:
        return self._running_at[worker]

    def worker_of(self, name: str) -> str | None:
        """Return the worker that evaluates a row, or None."""
        return self._running[name].worker if name in self._running else None

    def running(self, name: str) -> tuple[int, int] | None:
        """Return version and row that a group evaluates, or None where nobody evaluates it."""
        found = self._running.get(name)
        return found and (found.version, found.row)

    def release(self, worker: str, holding: Collection[str] = ()) -> list[str]:
        """Take back the rows of a worker that is gone, or that an answer lost; return their names."""
        if not self._running_at[worker]:
            return []
        lost = [name for name, found in self._running.items() if found.worker == worker and name not in holding]
        for name in lost:
            found = self._end(name)
            self._waiting[found.version].append(found.row)
        return lost

    def reclaim(self, worker: str, version: int | None, holding: Iterable[str]) -> None:
        """Give rows of `version`, of any where None, that were taken back to the worker that evaluates them nevertheless, as far as some
        may begin now."""
        for name in holding:
            waits = self._waits(name)
            if waits is not None and version in (waits, None) and self.room(waits) > 0:
                self._begin(worker, waits, _row_of(name))

    def wants(self, worker: str, name: str) -> bool:
        """Return whether a row that `worker` holds is its own, or waits."""
        return self.worker_of(name) == worker or self._waits(name) is not None

    def _waits(self, name: str) -> int | None:
        """Return the version that a row waits for, or None where it does not wait."""
        version = next((version for version in self._waiting if name.startswith(eval_prefix(version))), None)
        waits = name not in self._running and version is not None and _row_of(name) in self._waiting[version]
        return version if waits else None

    def _begin(self, worker: str, version: int, row: int) -> None:
        self._waiting[version].remove(row)
        self._running[eval_group_id(version, row)] = _Running(worker, version, row)
        self._running_at[worker] += 1
        self._running_of[version] += 1

    def _end(self, name: str) -> _Running:
        found = self._running.pop(name)
        self._running_at[found.worker] -= 1
        self._running_of[found.version] -= 1
        return found

    def conclude(self) -> Iterator[tuple[int, list[GroupMeta]]]:
        """Yield the evaluations that are over, each once, with their groups.

        They are closed in the order in which they began: scores of later versions wait for those of earlier ones.
        """
        while self._waiting and not self.open_of(version := next(iter(self._waiting))):
            del self._waiting[version]
            groups = self._finished.pop(version)
            yield version, [groups[name] for name in sorted(groups)]


def is_evaluated(run: Run, version: int) -> bool:
    return run.eval_summary(version).exists()


def begin_evaluation(run: Run, version: int, attempt: int) -> None:
    """Note that an evaluation has begun, so that its weights and its checkpoint stay until it is over (hpcrl/rundir/evaluations.py).

    Args:
        attempt: of the run, to which the version belongs.
    """
    write_json(run.eval_begun(version), {"version": version, "attempt": attempt})


def can_evaluate(run: Run, version: int, *, from_model: bool) -> bool:
    """Return whether engines that start now can have a version: its weights are there, or it is the model that they start with.

    Args:
        from_model: whether they hold version 0 when they start.
    """
    return (version == 0 and from_model) or is_committed(run.weights_of(version))


def discard_after(run: Run, step: int) -> None:
    """Remove evaluations of versions that will be trained again."""
    for path in run.evals.glob("v*"):
        if (version_of(path) or 0) > step:
            discard(path)


def finished_rows(run: Run, version: int, work: Iterable[Work]) -> dict[str, GroupMeta]:
    """Return which rows of an evaluation that is not over are finished, by their names.

    None are where one had other settings, or was generated with other weights than those of `version`: then the files are of another
    evaluation. Where none are, all that was generated is removed.

    Args:
        work: of all rows; looked at only where some are finished.
    """
    kept = [row for path in row_files(run, version) for row in read_finished(path)]
    if kept:
        asked, weights = {item.group_id: item.asked for item in work}, _digest(run, version)
        expected = {name: (what, weights, version, version) for name, what in asked.items()}
        if all(_known(row) == expected.get(row.group.group_id) for row in kept):
            finished = {row.group.group_id: row.group for row in kept}
            print(f"version {version}: {len(finished)} of {len(asked)} rows were evaluated before", flush=True)
            return finished
        print(f"version {version} is evaluated again: it was with other settings, prompts or weights", flush=True)
    discard_rows(run, version)
    return {}


def _known(row: EvalRow) -> tuple[str, str, int, int]:
    return row.asked, row.weights, row.group.oldest_version, row.group.newest_version


def _digest(run: Run, version: int) -> str | None:
    """Return that of the weights that are published as `version`, as `EvalRow` has it; None where they cannot be read."""
    try:
        published = run.weights_of(version)  # version 0 is not, where it is the initial model
        return PublishedWeights.read(published).digest if version or is_committed(published) else ""
    except CommitError as error:
        print(error, flush=True)
        return None
