"""Which rollout workers there are: who calls, who has fallen silent or left, and when there are too few to go on."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from hpcrl.errors import RunError
from hpcrl.run.awake import AwakeClock
from hpcrl.run.layout import Run
from hpcrl.run.lease import FAILED, GIVEN_UP, RENEW_S, Lease, read_leases

SILENCE_S = 60.0
TICK_S = 0.5
_PREFIX = "rollout-"


@dataclass
class Worker:
    """A worker that calls.

    Attributes:
        seen: when it called last, by the roster's clock.
    """

    version: int
    state: str
    seen: float
    told_stop: bool = False


class Roster:
    """The workers that call, by name.

    Attributes:
        restarts: how often a worker called that had left, or had been silent for too long.
    """

    def __init__(self) -> None:
        # who is asked every TICK_S finds nobody silent because the controller itself was stopped
        self.clock = AwakeClock(2 * TICK_S)
        self.workers: dict[str, Worker] = {}
        self._gone: set[str] = set()
        self.restarts = 0

    def seen(self, name: str, version: int, state: str) -> Worker:
        """A worker has called; return it."""
        worker = self.workers.get(name)
        if worker is None:
            worker = self.workers[name] = Worker(version, state, 0.0)
            self.restarts += name in self._gone
            self._gone.discard(name)
        worker.version, worker.state, worker.seen = version, state, self.clock.now()
        return worker

    def remove(self, name: str) -> bool:
        """Strike a worker off; return whether it was there."""
        if self.workers.pop(name, None) is None:
            return False
        self._gone.add(name)
        return True

    def silent(self) -> list[str]:
        """Return the workers that have not called for too long."""
        now = self.clock.now()
        return [name for name, worker in self.workers.items() if now - worker.seen > SILENCE_S]


@dataclass(frozen=True)
class Floor:
    """When a run has too few replicas to go on.

    Attributes:
        least: replicas below which it does not go on for long.
        patience_s: how long it does.
        replicas: how many there are when all are well.
        elastic: whether some of them may come at any time, so that it is worth waiting for them.
    """

    least: int = 1
    patience_s: float = 900.0
    replicas: int = 1
    elastic: bool = False


class Presence:
    """Whether enough replicas are there: those that call, and those whose engines start, of which only their leases tell."""

    def __init__(self, run: Run, attempt: int, floor: Floor) -> None:
        self._run, self._attempt, self._floor = run, attempt, floor
        self._clock = AwakeClock(2 * TICK_S)
        self._enough = 0.0
        self._looked = -RENEW_S
        self._renewals: dict[str, tuple[float, float]] = {}
        self._leases: dict[str, Lease] = {}

    def failure(self, calling: Collection[str], training: bool) -> RunError | None:
        """Return why the run cannot go on, or None. To be called every TICK_S.

        Args:
            training: whether the trainer waits for replicas already.
        """
        floor, now = self._floor, self._clock.now()
        if len(calling) >= floor.least or not training:
            self._enough = now
        if now - self._looked >= RENEW_S and len(calling) < floor.least:
            self._looked = now
            self._look(now)
        if len({*calling, *self._starting(now)}) >= floor.least:
            self._enough = now
        given_up = [name for name, lease in self._leases.items() if lease.state.startswith(GIVEN_UP)]
        left = floor.replicas - len(given_up)
        if not floor.elastic and left < floor.least and len(calling) < floor.least:
            return RunError(
                f"{self._too_few(calling)}, and {len(given_up)} of {floor.replicas} are given up{self._said()}"
            )
        if now - self._enough > floor.patience_s:
            return RunError(
                f"{self._too_few(calling)} for {floor.patience_s:.0f} s (slurm.replica_patience_minutes){self._said()}"
            )
        return None

    def _look(self, now: float) -> None:
        """Read the leases. Clocks of hosts differ, so a lease is new when it has changed."""
        leases = [lease for lease in read_leases(self._run, self._attempt) if lease.process.startswith(_PREFIX)]
        self._leases = {lease.process: lease for lease in leases}
        for lease in leases:
            renewed, _ = self._renewals.get(lease.process, (None, now))
            if renewed != lease.renewed:
                self._renewals[lease.process] = lease.renewed, now

    def _starting(self, now: float) -> list[str]:
        ended = (FAILED, GIVEN_UP, "finished", "stopped")
        return [
            name
            for name, lease in self._leases.items()
            if not lease.state.startswith(ended) and now - self._renewals[name][1] < SILENCE_S
        ]

    def _too_few(self, calling: Collection[str]) -> str:
        has = f"only {len(calling)} rollout workers have" if calling else "no rollout worker has"
        wants = f", fewer than slurm.min_replicas ({self._floor.least})," if calling else ""
        return f"{has} called{wants}"

    def _said(self) -> str:
        last = [f"{name}: {lease.state}" for name, lease in sorted(self._leases.items())]
        return f"; last heard: {'; '.join(last)}" if last else ""
