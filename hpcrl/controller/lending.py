"""Decides when engines use the trainer's GPUs while it waits for a batch (trainer.placement.lend). Pure logic: times are given, no HTTP.

A lease costs c1 seconds at its start, the trainer's offload and the engine's wake, and c2 seconds at its end, the engine's sleep and the
trainer's onload. There are E replicas on GPUs of their own, and L lent ones of the same speed. A wait of R seconds becomes
(R E + c1 L) / (E + L) + c2 seconds. That is less where

    R > c1 + c2 (1 + E / L).

R is the number of groups that the batch lacks, divided by the groups per second that the E replicas finish while the trainer waits. The
start of an engine adds its seconds, divided by the steps that are left, to c1. Each number is the median of its newest measurements. A start
without a measurement takes as long as the first replica took to call, another cost counts as 0, and without a rate no lease is given.

The inequality leaves out that a batch may wait for its longest group, and that a group which a lease interrupts takes longer. So steps with
leases are compared with steps without them, and leases end where they do not make steps shorter.

An engine begins groups only where no replica on GPUs of its own has room for them. What it has begun when a lease ends stays with it, and
goes on with the next lease. Where a batch lacks nothing else, the engine gets that lease whatever it costs, so no run stands still; it then
begins no others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from statistics import median

from hpcrl.controller.admission import Admission
from hpcrl.controller.dispatch import Dispatcher
from hpcrl.controller.evaluation import EvalQueue

_NEWEST = 9
_APART, _TRIED, _COMPARED, _OFF = 3, 5, 7, 20


class RunningMedian:
    """Median of the newest values."""

    def __init__(self) -> None:
        self._values = deque[float](maxlen=_NEWEST)

    def add(self, value: float) -> None:
        self._values.append(value)

    @property
    def value(self) -> float | None:
        """The median; None without a value."""
        return median(self._values) if self._values else None

    @property
    def seconds(self) -> float:
        """The median; 0 without a value."""
        return self.value or 0.0


class StepTrial:
    """Compares the seconds of steps with leases and without them.

    _APART steps without leases come first, then at least _TRIED with them. Where these are no shorter, _APART without are measured again,
    since the run may have become slower. Where they still are no shorter, there are no leases for _OFF steps.
    """

    def __init__(self) -> None:
        self._with, self._without = deque[float](maxlen=_COMPARED), deque[float](maxlen=_COMPARED)
        self._off = 0

    @property
    def lends(self) -> bool:
        """Whether the next step is to have leases, if they pay."""
        if len(self._without) < _APART:
            return False
        return len(self._with) < _TRIED or median(self._with) < median(self._without)

    def add(self, seconds: float, *, lent: bool) -> None:
        """Record a step."""
        (self._with if lent else self._without).append(seconds)
        if self.lends or len(self._without) < _APART:
            self._off = 0
        elif lent:
            self._without.clear()
        else:
            self._off += 1
        if self._off >= _OFF:
            self._with.clear()


@dataclass
class _EngineTimes:
    """Measured seconds of a lent engine.

    Attributes:
        start: from the lease to its first claim, where the engine is started.
        wake: the same where it sleeps.
        sleep: from the order to sleep until it sleeps.
        starts: whether it starts with its next lease.
        granted, ordered: when it got the lease, or the order to sleep, that it has not followed yet.
    """

    start: RunningMedian = field(default_factory=RunningMedian)
    wake: RunningMedian = field(default_factory=RunningMedian)
    sleep: RunningMedian = field(default_factory=RunningMedian)
    starts: bool = True
    granted: float | None = None
    ordered: float | None = None


class LeaseTimes:
    """Measures what leases cost and how long the trainer would wait, and decides whether a lease pays.

    Times are seconds of one clock that does not go back.

    Args:
        lent: names of the workers whose engines have the trainer's GPUs while it waits.

    Attributes:
        waits: whether the trainer waits for a batch that is not complete.
        away: whether its state has left its GPUs.
        leases: given so far.
    """

    def __init__(self, lent: Collection[str]) -> None:
        self.waits = self.away = False
        self.leases = 0
        self._engines = {name: _EngineTimes() for name in lent}
        self._offload, self._onload, self._rate = RunningMedian(), RunningMedian(), RunningMedian()
        self._replica_start: float | None = None
        self._began: float | None = None
        self._left: float | None = None
        self._finished = 0
        self._trial, self._trains, self._leases = StepTrial(), 0.0, 0

    @property
    def lends(self) -> bool:
        """Whether leases make steps shorter, or are to be tried."""
        return self._trial.lends

    @property
    def waking(self) -> int:
        """Engines that have the lease and have not asked for work yet."""
        return sum(own.granted is not None for own in self._engines.values())

    def trainer_waits(self, now: float, *, away: bool, onload: float = 0.0) -> None:
        """Record the trainer's request for a batch that is not complete.

        Args:
            away: whether its state has left its GPUs.
            onload: seconds in which it came back to them last; 0: it never did.
        """
        if self._began is None:
            self._began, self._finished = now, 0
            if onload > 0:
                self._onload.add(onload)
        if away and not self.away and self._left is not None:
            self._offload.add(now - self._left)
        self.waits, self.away = True, away

    def trainer_leaves(self, now: float) -> None:
        """Record that the trainer is asked to leave its GPUs."""
        self._left = now

    def batch_complete(self, now: float) -> None:
        """Record that the batch is there for which the trainer waits, or that it waits for none."""
        if self.waits and self._began is not None and now > self._began and self._finished:
            self._rate.add(self._finished / (now - self._began))
        self.waits, self._began = False, None

    def trainer_trains(self, now: float) -> None:
        """Record that the trainer has a batch and its GPUs."""
        self.away, self._left = False, None
        if self._trains:
            self._trial.add(now - self._trains, lent=self.leases > self._leases)
        self._trains, self._leases = now, self.leases

    def replica_started(self, seconds: float) -> None:
        """Record that a replica on GPUs of its own calls so many seconds after the controller began; the first one counts."""
        self._replica_start = seconds if self._replica_start is None else self._replica_start

    def finished(self, worker: str | None) -> None:
        """Count a finished group; None: no worker had it any more."""
        self._finished += worker is not None and worker not in self._engines

    def asleep(self, name: str, now: float, *, starts: bool = False) -> None:
        """Record that a lent engine sleeps, or has yet to be started."""
        own = self._engines[name]
        if own.ordered is not None and not starts:
            own.sleep.add(now - own.ordered)
        own.starts = starts
        self.left(name)

    def granted(self, name: str, now: float) -> None:
        """Record that a lent engine has the lease."""
        self._engines[name].granted = now
        self.leases += 1

    def awake(self, name: str, now: float) -> None:
        """Record that a lent engine asks for work."""
        own = self._engines[name]
        if own.granted is not None:
            (own.start if own.starts else own.wake).add(now - own.granted)
        own.granted = None

    def left(self, name: str) -> None:
        """Record that a lent engine has no lease: what it has yet to do is not measured."""
        self._engines[name].granted = self._engines[name].ordered = None

    def ordered(self, name: str, now: float) -> None:
        """Record that a lent engine is to sleep."""
        own = self._engines[name]
        own.ordered = now if own.ordered is None else own.ordered

    def pays(self, name: str, *, missing: int, replicas: int, steps: int) -> bool:
        """Return whether the trainer would wait less if this engine had its GPUs now.

        Args:
            missing: groups that the batch lacks.
            replicas: E, those on GPUs of their own.
            steps: that are left.
        """
        rate, own = self._rate.value, self._engines[name]
        if rate is None or not self.lends:
            return False
        begin = (0.0 if self.away else self._offload.seconds) + own.wake.seconds
        if own.starts:
            begin += (own.start.value or self._replica_start or 0.0) / max(1, steps)
        end = own.sleep.seconds + self._onload.seconds
        return missing / rate > begin + end * (1 + replicas / len(self._engines))


class Lending:
    """Policy of the leases of the trainer's GPUs.

    Args:
        lent: as of LeaseTimes.
        batch_size: groups per step.

    Attributes:
        times: what leases cost.
    """

    def __init__(
        self,
        lent: Collection[str],
        admission: Admission,
        dispatcher: Dispatcher,
        evaluation: EvalQueue,
        batch_size: int,
    ) -> None:
        self.lent, self.times = frozenset(lent), LeaseTimes(lent)
        self._admission, self._dispatcher, self._evaluation = admission, dispatcher, evaluation
        self._batch_size = batch_size
        self._resting, self._idle, self._finishing = set(lent), set[str](), set[str]()

    def rests(self, name: str) -> bool:
        """Return whether a worker is one of those that get leases, and has none."""
        return name in self._resting

    def rest(self, name: str, now: float, *, starts: bool) -> None:
        """Record that a lent engine sleeps, or has yet to start. It has no share in the groups that may begin; its own stay with it."""
        self.times.asleep(name, now, starts=starts)
        self.leave(name)

    def wake(self, name: str, now: float) -> None:
        """Record that a lent engine has the lease: it has its share in the groups that may begin, or is to finish those that it has begun."""
        self._resting.discard(name)
        if self.times.lends:
            self._dispatcher.join(name)
        else:
            self._finishing.add(name)
        self.times.granted(name, now)

    def leave(self, name: str) -> None:
        """Record that a lent engine sleeps, or has ended."""
        self._resting.add(name)
        self._idle.discard(name)
        self._finishing.discard(name)
        self._dispatcher.leave(name)
        self.times.left(name)

    def recalls(self, name: str) -> bool:
        """Return whether an engine is to give its lease back: the trainer waits no more, or the engine has nothing to do."""
        return not self.times.waits or name in self._idle

    def begins(self, name: str) -> bool:
        """Return whether a worker may begin groups, as far as leases decide that."""
        return name not in self._finishing and name not in self._resting

    def note_recall(self, name: str, now: float) -> None:
        """Record that the lease of an engine is recalled."""
        if name in self.lent:
            self.times.ordered(name, now)

    def wants(self, name: str, newest: int, own: Mapping[str, int], steps: int) -> bool:
        """Return whether a sleeping engine is to have the trainer's GPUs now.

        Args:
            newest: the version that engines should hold.
            own: the other workers that call, with the versions of their engines.
            steps: that are left.
        """
        if not self.times.waits:
            return False
        begun = self._admission.running_at(name) > 0
        if begun and self._lacks_groups_of_sleeping(newest):
            return True
        if not begun and not self._has_spare_groups(newest, own):
            return False
        missing = self._batch_size - self._admission.finished
        return self.times.pays(name, missing=missing, replicas=len(own), steps=steps)

    def note_idle(self, name: str, newest: int) -> None:
        """Record that an engine has found nothing to do: it is to sleep where it has no groups, and may begin none."""
        none = name in self._finishing or self._admission.room(newest) <= 0
        if none and self._admission.running_at(name) == 0:
            self._idle.add(name)

    def _lacks_groups_of_sleeping(self, newest: int) -> bool:
        """Return whether the batch waits for groups that sleeping engines have begun, or may."""
        admission = self._admission
        if admission.finished >= self._batch_size:  # it waits for those that must train in this step
            return admission.ready() is None
        return admission.running == sum(map(admission.running_at, self._resting)) and admission.room(newest) <= 0

    def _has_spare_groups(self, newest: int, own: Mapping[str, int]) -> bool:
        """Return whether groups may begin that neither engines which are waking nor other workers have room for."""
        if self._admission.room(newest) <= self.times.waking:
            return False
        # a worker with room waits for work, unless it has yet to load the newest version, or to finish rows of an evaluation
        waiting = {name for name, _ in self._dispatcher.waiting()}
        full = (
            name not in waiting and (held == newest or self._evaluation.running_at(name)) for name, held in own.items()
        )
        return all(full)
