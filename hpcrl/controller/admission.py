"""Admission of groups: which policy version may generate a group, and which groups train a step. Pure logic: no clock, no files, no HTTP.

Staleness of a group is (step that trains it) - 1 - (oldest version that produced one of its tokens). The bound S is hard. A group
that version v began must train by step v + 1 + S, its deadline. A group counts from its beginning on, and no longer once it is
lost, dropped or given up (see below). Besides the groups that steps need, E surplus groups may be begun, as a rule none. Before each
step s, for every step t from s on:

    at most (t - s + 1) * B + E groups that count, and that no step has taken, have a deadline of t or earlier.

It stays true when version v begins a group, with the deadline d = v + 1 + S. There are never more than d * B + E groups that count, and (s
- 1) * B are taken, so all others fit into the steps from s to d, but for E. It stays true when a step takes its B groups. They are the
finished ones with the earliest deadlines. The step waits for running ones as long as the groups that it leaves would not fit into the
steps after it, but for E. Once nothing runs, they fit. A group that no longer counts only makes room. So no
step is left with more than B + E groups that must train in it. It takes B first; the others are given up as surplus.

With S = 0 this is strictly on-policy training: step s takes exactly B groups that version s - 1 began.

A finished group that is not worth training is dropped, and the next claim begins another one instead: as many as are missing.

A group with turns of an earlier worker continues from them, if the version that began it may still begin it now. Otherwise it begins
again, without them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush

from hpcrl.types import GroupMeta


@dataclass(frozen=True)
class Claim:
    """A group that is being generated."""

    worker: str
    version: int


class Admission:
    """State of the prompt stream between claim and batch. Groups are named by their index in the stream.

    Args:
        batch_size: B, groups per step.
        staleness: S, `trainer.fully_async.max_staleness_steps`.
        total_steps: steps of the whole run.
        at_once: groups that run at the same time at most, `trainer.fully_async.num_parallel_generation_workers`; None for no
            bound of its own. It only lets a group begin later, so the proof above holds whatever it is.
        surplus: E, groups that are begun beyond those that steps need.

    Attributes:
        made: groups from this index on wait for their prompts, as for `at_once`; None: all prompts are there.
    """

    def __init__(
        self, batch_size: int, staleness: int, total_steps: int, at_once: int | None = None, surplus: int = 0
    ) -> None:
        self._batch_size, self._staleness, self._total = batch_size, staleness, total_steps
        self._at_once, self._surplus = at_once, surplus
        self.made: int | None = None
        self._cursor = 0
        self._returned = set[int]()
        self._left: Mapping[int, Collection[int]] = {}
        self._queue = list[int]()  # a heap of what is or was in _returned
        self._running: dict[int, Claim] = {}
        self._running_at: defaultdict[str, set[int]] = defaultdict(set)
        self._finished: dict[int, GroupMeta] = {}
        # groups by the version that their deadline depends on: deadlines are asked for at every request
        self._versions_running, self._versions_finished = Counter[int](), Counter[int]()
        self._composed = 0
        self._dropped: dict[int, GroupMeta] = {}

    @property
    def composed(self) -> int:
        """The newest step whose batch exists."""
        return self._composed

    @property
    def cursor(self) -> int:
        return self._cursor

    @property
    def first(self) -> int:
        """The first group that may begin."""
        return min(self._returned, default=self._cursor)

    @property
    def left(self) -> int:
        """Groups beyond the cursor that may still begin until the end of the run, unless others are dropped."""
        return max(0, self._fresh(self._total) - len(self._returned))

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def finished(self) -> int:
        """Groups that are complete and that no step has taken."""
        return len(self._finished)

    @property
    def dropped(self) -> list[GroupMeta]:
        """Groups that were dropped since the newest batch."""
        return list(self._dropped.values())

    @property
    def dropped_count(self) -> int:
        return len(self._dropped)

    def restore(self, composed: int, used: Iterable[int], finished: dict[int, GroupMeta], below: int = 0) -> None:
        """Continue an earlier attempt.

        Args:
            composed: newest step whose batch exists.
            used: indices of all groups in those batches, and of those that were dropped or given up for them.
            finished: groups that are complete and in no batch; they train instead of being generated again.
            below: all groups with a smaller index are used, too.
        """
        taken = set(used) | set(finished)
        self._composed = composed
        for index, meta in finished.items():
            self._keep(index, meta)
        self._cursor = max(below, max(taken, default=-1) + 1)
        self._give_back(index for index in range(below, self._cursor) if index not in taken)
        self._renew()

    def note_left(self, versions: Mapping[int, Collection[int]]) -> None:
        """Record the groups with turns of earlier workers, and the versions that began them."""
        self._left = versions

    def running_at(self, worker: str) -> int:
        return len(self._running_at[worker]) if worker in self._running_at else 0

    @property
    def workers(self) -> int:
        """Workers that generate groups."""
        return len(self._running_at)

    def worker_of(self, index: int) -> str | None:
        """Return the worker that generates a group, or None."""
        claim = self._running.get(index)
        return claim and claim.worker

    def wants(self, index: int) -> bool:
        """Return whether a group that was begun has yet to be finished."""
        return index in self._running or index in self._returned

    def is_finished(self, index: int) -> bool:
        """Return whether a group is complete, and no step has taken it."""
        return index in self._finished

    def may_begin(self, index: int) -> bool:
        """Return whether a group has not begun yet, or was taken back."""
        return index in self._returned or index >= self._cursor

    def is_used(self, index: int) -> bool:
        """Return whether a group will not begin, run or train any more."""
        return not (self.may_begin(index) or index in self._running or index in self._finished)

    def room(self, version: int) -> int:
        """Return how many groups an engine that holds `version` may begin now; 0 or less for none."""
        allowed = self._fresh(version)
        return allowed if self._at_once is None else min(allowed, self._at_once - len(self._running))

    def claim(self, worker: str, version: int, count: int) -> list[int]:
        """Return up to `count` groups that `worker`, whose engine holds `version`, may begin now."""
        most = min(count, self.room(version))
        if self.made is not None:
            again = sum(index < self.made for index in self._returned)
            most = min(most, again + max(0, self.made - self._cursor))
        indices = [self._next() for _ in range(most)]
        return [self._begin(index, worker, self._began(index, version)) for index in indices]

    def version_of(self, index: int) -> int:
        """Return the version that a group which is being generated counts as begun with; turns of older ones are of no use to it."""
        return self._running[index].version

    def complete(self, index: int, meta: GroupMeta) -> str | None:
        """Take a finished group; return None, or why it is not wanted."""
        claim = self._running.get(index)
        if claim is None and index not in self._returned:
            return "finished before, or given up" if index < self._cursor else "never claimed"
        if claim is not None:
            self._end(index)
        # of a worker that was thought lost: as if it were begun now
        if (claim is None or meta.oldest_version < claim.version) and self._fresh(meta.oldest_version) < 1:
            if claim:
                self._begin(index, claim.worker, claim.version)
            return "too old by now"
        self._returned.discard(index)
        self._keep(index, meta)
        return None

    def release(self, worker: str, holding: Collection[int] = ()) -> list[int]:
        """Take back the groups of a worker that is gone, or that an answer lost; others will generate them."""
        lost = sorted(self._running_at.get(worker, set()).difference(holding))
        for index in lost:
            self._end(index)
        self._give_back(lost)
        return lost

    def reclaim(self, worker: str, version: int, holding: Iterable[int]) -> None:
        """Give groups that were taken back to the worker that generates them nevertheless, as far as `version` may begin some now."""
        for index in holding:
            if index in self._returned and self.room(version) > 0:
                self._returned.discard(index)
                self._begin(index, worker, version)

    def update(self, index: int, meta: GroupMeta) -> None:
        """Update the metadata of a finished group, but not its versions."""
        assert meta.oldest_version == self._finished[index].oldest_version
        self._finished[index] = meta

    def drop(self, indices: Iterable[int]) -> None:
        """Drop finished groups that are not worth training: others are begun in their place."""
        for index in indices:
            self._dropped[index] = self._lose(index)

    def ready(self) -> list[tuple[int, GroupMeta]] | None:
        """Return the groups of the next step, or None while the batch is not complete."""
        step, size = self._composed + 1, self._batch_size
        if step > self._total or len(self._finished) < size:
            return None
        if self._running and self._late_after(step) > self._surplus:
            return None
        order = sorted(self._finished, key=lambda index: (self._finished[index].oldest_version, index))
        return [(index, self._finished[index]) for index in sorted(order[:size])]

    def overdue(self, indices: Collection[int]) -> list[int]:
        """Return the groups that are given up if these are the batch of the next step, the last in which they could have trained."""
        ends = self._composed + 1 == self._total
        # this version, and what is older, must train in the step at hand
        last = self._total if ends else self._composed - self._staleness
        if not self._surplus or all(v > last for v in (*self._versions_running, *self._versions_finished)):
            return []
        taken = set(indices)
        late = [index for index, claim in self._running.items() if claim.version <= last]
        late += [i for i, meta in self._finished.items() if i not in taken and meta.oldest_version <= last]
        return sorted([*late, *self._returned] if ends else late)

    def take(self, indices: Collection[int]) -> None:
        """Take these ready groups as the batch of the next step; overdue ones are given up."""
        for index in self.overdue(indices):
            if index in self._running:
                self._end(index)
            elif index in self._finished:
                self._lose(index)
            else:
                self._returned.discard(index)
        for index in indices:
            self._lose(index)
        self._composed += 1
        self._dropped = {}
        self._renew()

    def _deadline(self, version: int) -> int:
        return version + 1 + self._staleness

    def _fresh(self, version: int) -> int:
        """Return how many groups `version` may begin so that all of them train in time."""
        last = min(self._total, self._deadline(version))
        if last <= self._composed:
            return 0
        begun = self._composed * self._batch_size + len(self._finished) + len(self._running)
        return last * self._batch_size + self._surplus - begun

    def _late_after(self, step: int) -> int:
        """Return how many of the groups that `step` would leave could not all train in time."""
        taking, left, late = self._batch_size, 0, 0
        for version in sorted(self._versions_running.keys() | self._versions_finished.keys()):
            finished = self._versions_finished[version]
            taken = min(taking, finished)
            taking -= taken
            left += finished - taken + self._versions_running[version]
            late = max(late, left - (self._deadline(version) - step) * self._batch_size)
        return late

    def _renew(self) -> None:
        if all(self._deadline(version) > self._composed for version in self._versions_finished):
            return
        old = [index for index, meta in self._finished.items() if self._deadline(meta.oldest_version) <= self._composed]
        for index in old:
            self._lose(index)
        self._give_back(old)

    def _began(self, index: int, version: int) -> int:
        """Return the oldest version that may have begun a group whose worker holds `version`."""
        left = (older for older in self._left.get(index, ()) if older <= version and self._fresh(older) > 0)
        return min(left, default=version)

    def _next(self) -> int:
        while self._queue:
            index = heappop(self._queue)
            if index in self._returned:
                self._returned.discard(index)
                return index
        self._cursor += 1
        return self._cursor - 1

    def _give_back(self, indices: Iterable[int]) -> None:
        if not self._returned:
            self._queue = []
        for index in indices:
            self._returned.add(index)
            heappush(self._queue, index)

    def _begin(self, index: int, worker: str, version: int) -> int:
        self._running[index] = Claim(worker, version)
        self._running_at[worker].add(index)
        self._versions_running[version] += 1
        return index

    def _end(self, index: int) -> Claim:
        claim = self._running.pop(index)
        self._running_at[claim.worker].discard(index)
        if not self._running_at[claim.worker]:
            del self._running_at[claim.worker]
        _less(self._versions_running, claim.version)
        return claim

    def _keep(self, index: int, meta: GroupMeta) -> None:
        self._finished[index] = meta
        self._versions_finished[meta.oldest_version] += 1

    def _lose(self, index: int) -> GroupMeta:
        meta = self._finished.pop(index)
        _less(self._versions_finished, meta.oldest_version)
        return meta


def _less(counts: Counter[int], version: int) -> None:
    counts[version] -= 1
    if not counts[version]:
        del counts[version]


def staleness(step: int, meta: GroupMeta) -> int:
    """Return the staleness of a group that trains in `step`; below 0 it comes from a policy that is yet to be trained."""
    return step - 1 - meta.oldest_version
