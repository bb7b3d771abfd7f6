"""Dispatch: divides the groups that may begin, and the rows of an evaluation, among the workers. Pure logic.

A worker asks for as many groups as its engine has room for; evaluation goes first. Where there is less work than room, workers get equal
shares (water-filling): none gets more than a common level, its present work included. So a worker that asks later, or still loads weights,
finds its share. A worker with less room than the level gets what fits in, and the
others share the rest. No worker gets a second group as long as another would find none. A worker that got nothing waits, and the least
loaded of those that wait is served first.

Samples of one group are never divided: they share the prompt's cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush

from hpcrl.controller.admission import Admission
from hpcrl.controller.evaluation import EvalQueue


@dataclass(frozen=True)
class Assignment:
    """Work that a worker may begin.

    Attributes:
        rows: of the evaluation.
        indices: of training groups.
    """

    rows: list[int]
    indices: list[int]

    def __bool__(self) -> bool:
        return bool(self.rows or self.indices)


class Dispatcher:
    """Divides the work of `admission` and `evaluation`.

    Args:
        n_samples, eval_n_samples: samples of a training group, and of a row of the evaluation.
    """

    def __init__(self, admission: Admission, evaluation: EvalQueue, n_samples: int, eval_n_samples: int) -> None:
        self._admission, self._evaluation = admission, evaluation
        self._n_samples, self._eval_n_samples = n_samples, eval_n_samples
        self._capacity: dict[str, int | None] = {}  # groups at most; None until the worker has asked once
        self._capacities = Counter[int | None]()
        self._waiting: dict[str, tuple[int, int]] = {}  # version and room
        self._queue = list[
            tuple[int, str]
        ]()  # a heap by load; an entry is void if its load is not the worker's any more

    def join(self, worker: str) -> None:
        """Register a worker, which will ask for work."""
        if worker not in self._capacity:
            self._set_capacity(worker, None)

    def leave(self, worker: str) -> None:
        self.withdraw(worker)
        if worker in self._capacity:
            self._forget_capacity(worker)

    def claim(self, worker: str, version: int, room: int) -> Assignment:
        """Return what a worker that has room for `room` groups, and whose engine holds `version`, may begin now.

        As many samples fit in if they are for evaluation.
        """
        evaluating, running = self._evaluation.running_at(worker), self._admission.running_at(worker)
        self._set_capacity(worker, running + self._groups(evaluating) + room)
        return self._claim(worker, version, room)

    def wait(self, worker: str, version: int, room: int) -> None:
        """Queue a worker without work; `assignments` serves it once."""
        self._waiting[worker] = version, room
        self._enqueue(worker)

    def withdraw(self, worker: str) -> None:
        """Remove a worker from the queue."""
        self._waiting.pop(worker, None)

    def load_changed(self, worker: str) -> None:
        """Record that a worker has less to do than before."""
        if worker in self._waiting:
            self._enqueue(worker)

    def assignments(self, version: int) -> Iterator[tuple[str, Assignment]]:
        """Yield the waiting workers' assignments, now that `version` is the newest."""
        passed = list[tuple[int, str]]()
        while self._queue and (self._evaluation.room > 0 or self._admission.room(version) > 0):
            load, worker = entry = heappop(self._queue)
            if worker not in self._waiting or load != self._load(worker):
                continue
            held, room = self._waiting[worker]
            assignment = self._claim(worker, held, room)
            if assignment:
                del self._waiting[worker]
                yield worker, assignment
                continue
            passed.append(entry)
            if not self._evaluation.room:  # all others have at least as much to do
                break
        for entry in passed:
            heappush(self._queue, entry)

    def _claim(self, worker: str, version: int, room: int) -> Assignment:
        rows = list[int]()
        if self._evaluation.open:
            most = max(self._rows(room), min(room, 1))
            share = self._level(self._evaluation.open, evaluation=True) - self._evaluation.running_at(worker)
            rows = self._evaluation.claim(worker, version, min(most, share))
            room = max(0, room - self._groups(len(rows)))
        available = self._admission.room(version)
        if room <= 0 or available <= 0:
            return Assignment(rows, [])
        running = self._admission.running_at(worker)
        idle = len(self._capacity) - self._admission.workers - (not running)  # other workers
        most = min(room, max(available - idle, not running))
        if most <= 0:
            return Assignment(rows, [])
        share = self._level(self._admission.running + available) - running
        return Assignment(rows, self._admission.claim(worker, version, min(most, share)))

    def _level(self, work: int, evaluation: bool = False) -> int:
        """Return the level of `work` per worker at which all with room take part.

        Args:
            evaluation: whether it is counted in rows of the evaluation, not in groups.
        """
        left, workers, most = work, len(self._capacity), 0
        known = sorted(capacity for capacity in self._capacities if capacity is not None)
        for capacity in known:
            most = max(1, self._rows(capacity)) if evaluation else capacity
            if most * workers >= left:
                break
            left -= most * self._capacities[capacity]
            workers -= self._capacities[capacity]
        return -(-left // workers) if workers else most

    def _load(self, worker: str) -> int:
        rows, groups = self._evaluation.running_at(worker), self._admission.running_at(worker)
        return rows * self._eval_n_samples + groups * self._n_samples

    def _enqueue(self, worker: str) -> None:
        heappush(self._queue, (self._load(worker), worker))

    def _set_capacity(self, worker: str, capacity: int | None) -> None:
        if worker in self._capacity:
            if self._capacity[worker] == capacity:
                return
            self._forget_capacity(worker)
        self._capacity[worker] = capacity
        self._capacities[capacity] += 1

    def _forget_capacity(self, worker: str) -> None:
        capacity = self._capacity.pop(worker)
        self._capacities[capacity] -= 1
        if not self._capacities[capacity]:
            del self._capacities[capacity]

    def _rows(self, groups: int) -> int:
        return groups * self._n_samples // self._eval_n_samples

    def _groups(self, rows: int) -> int:
        return -(-rows * self._eval_n_samples // self._n_samples)
