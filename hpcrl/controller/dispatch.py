"""Dispatch: divides the groups that may begin, and the rows of an evaluation, among the workers. Pure logic.

A worker asks for as many groups as its engine has room for. Rows of an evaluation begin on workers without training groups: they fill the
time in which engines would wait. A worker that is to load a newer version gets its rows first. Where there is less work than room, workers
get equal shares (water-filling): none gets more than a common level, its present work included. So a worker that asks later, or still loads
weights, finds its share; none of the groups is kept for one that evaluates beside training. A worker with less room than the level gets
what fits in, and the others share the rest. No worker gets a second group as long as another would find none. A worker that got nothing
waits, and the least loaded of those that wait is served first. Rows have a queue of their own, by rows: a worker without groups finds
some also where those with less to do wait for groups alone. An engine that serves several versions gets rows of any, those of older ones
first, and groups of the newest beside them. Replicas that only evaluate get all rows as long as one of them is there.

Samples of one group are never divided: they share the prompt's cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush

from hpcrl.controller.admission import Admission
from hpcrl.controller.evaluation import EvalQueue


@dataclass(frozen=True)
class Assignment:
    """Work that a worker may begin.

    Attributes:
        version: that the rows are generated with; the worker's engine holds it, or serves several.
        rows: of the evaluation of that version.
        indices: of training groups.
    """

    version: int
    rows: list[int]
    indices: list[int]

    def __bool__(self) -> bool:
        return bool(self.rows or self.indices)


class Dispatcher:
    """Divides the work of `admission` and `evaluation`.

    Args:
        n_samples, eval_n_samples: samples of a training group, and of a row of the evaluation.
        together: rows begin beside training groups, since training waits for both.
        lent: workers that get no rows, since they may have to stop at any moment, and a score belongs to one version.
        evaluators: workers that only evaluate.
    """

    def __init__(
        self,
        admission: Admission,
        evaluation: EvalQueue,
        n_samples: int,
        eval_n_samples: int,
        *,
        together: bool = False,
        lent: Collection[str] = (),
        evaluators: Collection[str] = (),
    ) -> None:
        self._admission, self._evaluation, self._together = admission, evaluation, together
        self._lent = lent
        self._n_samples, self._eval_n_samples = n_samples, eval_n_samples
        self._capacity: dict[str, int | None] = {}  # groups at most; None until the worker has asked once
        self._evaluators, self._any_version = evaluators, set[str]()
        self._capacities, self._eval_capacities = Counter[int | None](), Counter[int | None]()
        self._held: dict[str, int] = {}  # the version of a worker's engine when it asked last
        self._waiting: dict[str, tuple[int, int]] = {}  # version and room
        self._waiting_with = Counter[int]()
        # heaps by load, or by rows; an entry is void if it is not what the worker has to do any more
        self._queues: dict[int, list[tuple[int, str]]] = {}  # by the version of the engine
        self._row_queues: dict[int, list[tuple[int, str]]] = {}  # by the version that is evaluated

    def join(self, worker: str) -> None:
        """Register a worker, which will ask for work."""
        if worker not in self._capacity:
            self._set_capacity(worker, None)

    def leave(self, worker: str) -> None:
        self.withdraw(worker)
        if worker in self._capacity:
            self._forget_capacity(worker)
        self._held.pop(worker, None)
        self._any_version.discard(worker)
        if worker in self._evaluators and not self._eval_capacities:
            for other in self._waiting:  # they get rows from now on
                self._enqueue(other)

    def evaluates(self, worker: str) -> bool:
        """Return whether a worker gets rows: no other one only evaluates, or it does."""
        return worker in self._evaluators or (not self._eval_capacities and worker not in self._lent)

    def claim(
        self, worker: str, version: int, room: int, *, behind: bool = False, any_version: bool = False
    ) -> Assignment:
        """Return what a worker that has room for `room` groups, and whose engine holds `version`, may begin now.

        As many samples fit in if they are for evaluation.

        Args:
            behind: whether there is a newer version.
            any_version: whether its engine, which holds the newest, evaluates any.
        """
        self._any_version.discard(worker)
        if any_version:
            self._any_version.add(worker)
        evaluating, running = self._evaluation.running_at(worker), self._admission.running_at(worker)
        self._set_capacity(worker, running + self._groups(evaluating) + room)
        self._held[worker] = version
        return self._claim(worker, version, room, behind)

    def waiting(self) -> list[tuple[str, int]]:
        """Return the workers that wait, with the versions of their engines."""
        return [(worker, held) for worker, (held, _) in self._waiting.items()]

    def wait(self, worker: str, version: int, room: int) -> None:
        """Queue a worker without work; `assignments` serves it once."""
        self.withdraw(worker)
        self._waiting[worker] = version, room
        self._waiting_with[version] += 1
        self._enqueue(worker)

    def withdraw(self, worker: str) -> None:
        """Remove a worker from the queue."""
        if worker not in self._waiting:
            return
        version, _ = self._waiting.pop(worker)
        self._waiting_with[version] -= 1
        if not self._waiting_with[version]:
            del self._waiting_with[version]
            self._queues.pop(version, None)

    def load_changed(self, worker: str) -> None:
        """Record that a worker has less to do than before."""
        if worker in self._waiting:
            self._enqueue(worker)

    def assignments(self, version: int) -> Iterator[tuple[str, Assignment]]:
        """Yield the waiting workers' assignments, now that `version` is the newest."""
        for held in list(self._queues):
            room, load = partial(self._admission.room, held), partial(self._load_with, held)
            yield from self._serve(self._queues[held], room, load, version)
        for evaluated in list(self._row_queues):
            if not self._evaluation.open_of(evaluated):
                del self._row_queues[evaluated]
                continue
            room, rows = partial(self._evaluation.room, evaluated), partial(self._rows_with, evaluated, version)
            yield from self._serve(self._row_queues[evaluated], room, rows, version)

    def _load_with(self, held: int, worker: str) -> int | None:
        """Return the load of a waiting worker whose engine holds a version; None for another worker."""
        waits = worker in self._waiting and self._waiting[worker][0] == held
        return self._load(worker) if waits else None

    def _rows_with(self, evaluated: int, newest: int, worker: str) -> int | None:
        """Return the rows of a waiting worker that may begin some of a version; None for another worker."""
        waits = worker in self._waiting and (worker in self._any_version or self._waiting[worker][0] == evaluated)
        begins = waits and self.evaluates(worker) and self._begins_rows(worker, behind=evaluated < newest)
        return self._evaluation.running_at(worker) if begins else None

    def _serve(
        self, queue: list[tuple[int, str]], room: Callable[[], int], load: Callable[[str], int | None], newest: int
    ) -> Iterator[tuple[str, Assignment]]:
        """Yield assignments until a worker gets none: all others have at least as much to do."""
        while queue and room() > 0:
            found, worker = entry = heappop(queue)
            if found != load(worker):
                continue
            held, free = self._waiting[worker]
            assignment = self._claim(worker, held, free, held < newest)
            if not assignment:
                heappush(queue, entry)
                return
            self.withdraw(worker)
            yield worker, assignment

    def _claim(self, worker: str, version: int, room: int, behind: bool) -> Assignment:
        evaluated = self._evaluated_by(worker, version)
        if worker in self._evaluators:
            return Assignment(evaluated, self._claim_rows(worker, evaluated, room, behind=behind), [])
        behind = behind or evaluated < version
        if behind or self._together:
            rows = self._claim_rows(worker, evaluated, room, behind=behind)
            groups = self._claim_groups(worker, version, room - self._groups(len(rows)))
            return Assignment(evaluated, rows, groups)
        groups = self._claim_groups(worker, version, room)
        begins = not groups and self._begins_rows(worker, behind)
        rows = self._claim_rows(worker, evaluated, room, behind=False) if begins else []
        return Assignment(evaluated, rows, groups)

    def _evaluated_by(self, worker: str, version: int) -> int:
        """Return the version of which a worker, whose engine holds `version`, may begin rows: the oldest that its engine serves."""
        if worker not in self._any_version:
            return version
        return next((one for one in self._evaluation.versions if self._evaluation.room(one) > 0), version)

    def _begins_rows(self, worker: str, behind: bool) -> bool:
        return behind or self._together or not self._admission.running_at(worker)

    def _claim_rows(self, worker: str, version: int, room: int, *, behind: bool) -> list[int]:
        if room <= 0 or self._evaluation.room(version) <= 0 or not self.evaluates(worker):
            return []
        most = max(self._rows(room), 1)
        share = self._level_of_rows(version, behind) - self._evaluation.running_at(worker)
        return self._evaluation.claim(worker, version, min(most, share))

    def _claim_groups(self, worker: str, version: int, room: int) -> list[int]:
        available = self._admission.room(version)
        if room <= 0 or available <= 0:
            return []
        running, evaluating = self._admission.running_at(worker), self._evaluating_besides(worker)
        idle = self._capacities.total() - len(evaluating) - self._admission.workers - (not running)  # other workers
        most = min(room, max(available - idle, not running))
        if most <= 0:
            return []
        capacities = self._capacities - Counter(self._capacity[name] for name in evaluating)
        share = _level(self._admission.running + available, capacities) - running
        return self._admission.claim(worker, version, min(most, share))

    def _evaluating_besides(self, worker: str) -> list[str]:
        """Return the other workers with rows and no groups; none where training waits for rows too."""
        if self._together:
            return []
        names = self._evaluation.workers
        others = (name for name in names if name != worker and name not in self._evaluators)
        return [name for name in others if not self._admission.running_at(name)]

    def _level_of_rows(self, version: int, behind: bool) -> int:
        """Return the level of the rows of a version; workers that can serve only a newer one take no part."""
        lent = Counter(self._capacity[name] for name in self._lent if name in self._capacity)
        workers = self._eval_capacities or self._capacities - lent
        if behind:
            able = (name for name, held in self._held.items() if held <= version or name in self._any_version)
            workers = Counter(self._capacity[name] for name in able if self.evaluates(name))
        rooms = Counter[int | None]()
        for capacity, count in workers.items():
            rooms[None if capacity is None else max(1, self._rows(capacity))] += count
        return _level(self._evaluation.open_of(version), rooms)

    def _load(self, worker: str) -> int:
        rows, groups = self._evaluation.running_at(worker), self._admission.running_at(worker)
        return rows * self._eval_n_samples + groups * self._n_samples

    def _enqueue(self, worker: str) -> None:
        version, _ = self._waiting[worker]
        if worker not in self._evaluators:
            heappush(self._queues.setdefault(version, []), (self._load(worker), worker))
        if self.evaluates(worker):
            for evaluated in self._evaluation.versions if worker in self._any_version else [version]:
                if self._evaluation.open_of(evaluated):
                    entry = self._evaluation.running_at(worker), worker
                    heappush(self._row_queues.setdefault(evaluated, []), entry)

    def _set_capacity(self, worker: str, capacity: int | None) -> None:
        if worker in self._capacity:
            if self._capacity[worker] == capacity:
                return
            self._forget_capacity(worker)
        self._capacity[worker] = capacity
        self._counter(worker)[capacity] += 1

    def _forget_capacity(self, worker: str) -> None:
        capacity, counter = self._capacity.pop(worker), self._counter(worker)
        counter[capacity] -= 1
        if not counter[capacity]:
            del counter[capacity]

    def _counter(self, worker: str) -> Counter[int | None]:
        return self._eval_capacities if worker in self._evaluators else self._capacities

    def _rows(self, groups: int) -> int:
        return groups * self._n_samples // self._eval_n_samples

    def _groups(self, rows: int) -> int:
        return -(-rows * self._eval_n_samples // self._n_samples)


def _level(work: int, capacities: Counter[int | None]) -> int:
    """Return the level of `work` per worker at which all with room take part.

    Args:
        capacities: how many workers have which; None: not known yet.
    """
    left, workers, most = work, sum(capacities.values()), 0
    for most in sorted(capacity for capacity in capacities if capacity is not None):
        if most * workers >= left:
            break
        left -= most * capacities[most]
        workers -= capacities[most]
    return -(-left // workers) if workers else most
