"""Registry of rollout workers and scorers: calling, silent and gone ones, the GPU lease, and the least number to go on."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from hpcrl.errors import RunError, UserCodeError
from hpcrl.rundir.layout import Run
from hpcrl.rundir.process_names import WORKER
from hpcrl.runtime.heartbeat import SuspendAwareClock
from hpcrl.runtime.process_status import FAILED, GIVEN_UP, RENEW_S, ProcessStatus, read_process_statuses
from hpcrl.types import GroupMeta

SILENCE_S = 60.0
TICK_S = 0.5


@dataclass
class RegisteredWorker:
    """A worker that calls.

    Attributes:
        seen: when it called last, by the registry's clock.
        any_version: whether its engine evaluates any version beside the newest.
    """

    version: int
    state: str
    seen: float
    stop_sent: bool = False
    any_version: bool = False


class WorkerRegistry:
    """The workers that call, by name.

    Attributes:
        restarts: how often a worker called that had left, or had been silent for too long.
    """

    def __init__(self) -> None:
        # who is asked every TICK_S finds nobody silent because the controller itself was stopped
        self.clock = SuspendAwareClock(2 * TICK_S)
        self.workers: dict[str, RegisteredWorker] = {}
        self._gone: set[str] = set()
        self.restarts = 0

    def seen(self, name: str, version: int, state: str) -> RegisteredWorker:
        """Record a call of a worker; return it."""
        worker = self.workers.get(name)
        if worker is None:
            worker = self.workers[name] = RegisteredWorker(version, state, 0.0)
            self.restarts += name in self._gone
            self._gone.discard(name)
        worker.version, worker.state, worker.seen = version, state, self.clock.now()
        return worker

    def remove(self, name: str) -> bool:
        """Remove a worker; return whether it was there."""
        if self.workers.pop(name, None) is None:
            return False
        self._gone.add(name)
        return True

    def silent(self) -> list[str]:
        """Return the workers that have not called for too long."""
        now = self.clock.now()
        return [name for name, worker in self.workers.items() if now - worker.seen > SILENCE_S]


class GpuLease:
    """Which engines have the devices that they share with the trainer (trainer.placement.colocate_all); none where they share none.

    A request for the lease means that the worker's engine sleeps, or has not been started. A lease is recalled by the answer to its holder,
    which asks all the time. A worker that has ended holds no lease; a silent one may still hold it, and the trainer waits until its agent
    has ended it.

    Attributes:
        awake: workers whose engines are awake, or being started.
    """

    def __init__(self) -> None:
        self.awake: set[str] = set()
        self._asking: dict[str, object] = {}

    @property
    def asking(self) -> list[str]:
        """Workers that wait for the lease."""
        return list(self._asking)

    def ask(self, name: str) -> object:
        """Note that a worker asks for the lease; return the request, by which `grant` knows it. Earlier ones of the worker are void."""
        self.awake.discard(name)
        self._asking[name] = request = object()
        return request

    def grant(self, name: str, request: object) -> bool:
        """Let a worker's engine wake, or start, if the worker still waits for this request's answer; return whether it does."""
        if self._asking.get(name) is not request:
            return False
        del self._asking[name]
        self.awake.add(name)
        return True

    def leave(self, name: str) -> None:
        """Remove a worker that has ended."""
        self.awake.discard(name)
        self._asking.pop(name, None)


@dataclass(frozen=True)
class MinReplicas:
    """Least number of replicas, or of scorers of one model, and the patience before the run ends.

    Attributes:
        least: replicas below which it does not go on for long.
        patience_s: how long it does.
        replicas: how many there are when all are well.
        elastic: whether some of them may come at any time, so that it is worth waiting for them.
        what: each of them is, for people.
        setting: that says what the least is.
        names: of those that count; None: all rollout workers.
    """

    least: int = 1
    patience_s: float = 900.0
    replicas: int = 1
    elastic: bool = False
    what: str = "rollout worker"
    setting: str = "slurm.min_replicas"
    names: Collection[str] | None = None

    def among(self, names: Iterable[str]) -> list[str]:
        """Return the processes that count here."""
        return [name for name in names if (name.startswith(WORKER) if self.names is None else name in self.names)]


class ReplicaHealth:
    """Whether enough replicas, or scorers of one model, are there: calling ones, and starting ones by their process statuses."""

    def __init__(self, run: Run, attempt: int, min_replicas: MinReplicas) -> None:
        self._run, self._attempt, self._min_replicas = run, attempt, min_replicas
        self._clock = SuspendAwareClock(2 * TICK_S)
        self._enough = 0.0
        self._looked = -RENEW_S
        self._renewals: dict[str, tuple[float, float]] = {}
        self._process_statuses: dict[str, ProcessStatus] = {}

    def failure(self, calling: Collection[str], training: bool) -> RunError | None:
        """Return the reason why the run cannot go on, or None. To be called every TICK_S.

        Args:
            calling: the processes that call, others than those that are meant too.
            training: whether the trainer waits for replicas already.
        """
        min_replicas, now = self._min_replicas, self._clock.now()
        calling = min_replicas.among(calling)
        if len(calling) >= min_replicas.least or not training:
            self._enough = now
        if now - self._looked >= RENEW_S and len(calling) < min_replicas.least:
            self._looked = now
            self._look(now)
        if len({*calling, *self._starting(now)}) >= min_replicas.least:
            self._enough = now
        given_up = [
            name for name, process_status in self._process_statuses.items() if process_status.state.startswith(GIVEN_UP)
        ]
        left = min_replicas.replicas - len(given_up)
        if not min_replicas.elastic and left < min_replicas.least and len(calling) < min_replicas.least:
            return RunError(
                f"{self._too_few(calling)}, and {len(given_up)} of {min_replicas.replicas} are given up{self._said()}"
            )
        if now - self._enough > min_replicas.patience_s:
            return RunError(
                f"{self._too_few(calling)} for {min_replicas.patience_s:.0f} s (slurm.replica_patience_minutes){self._said()}"
            )
        return None

    def _look(self, now: float) -> None:
        """Read the process_statuses. Clocks of hosts differ, so a process status is new when it has changed."""
        every = {status.process: status for status in read_process_statuses(self._run, self._attempt)}
        self._process_statuses = {name: every[name] for name in self._min_replicas.among(every)}
        for process_status in self._process_statuses.values():
            renewed, _ = self._renewals.get(process_status.process, (None, now))
            if renewed != process_status.renewed:
                self._renewals[process_status.process] = process_status.renewed, now

    def _starting(self, now: float) -> list[str]:
        ended = (FAILED, GIVEN_UP, "finished", "stopped")
        return [
            name
            for name, process_status in self._process_statuses.items()
            if not process_status.state.startswith(ended) and now - self._renewals[name][1] < SILENCE_S
        ]

    def _too_few(self, calling: Collection[str]) -> str:
        few = self._min_replicas
        has = f"only {len(calling)} {few.what}s have" if calling else f"no {few.what} has"
        wants = f", fewer than {few.setting} ({few.least})," if calling else ""
        return f"{has} called{wants}"

    def _said(self) -> str:
        last = [f"{name}: {process_status.state}" for name, process_status in sorted(self._process_statuses.items())]
        return f"; last heard: {'; '.join(last)}" if last else ""


class FailureWindow:
    """Failure ratio over the newest groups, as many as a step has.

    Args:
        ratio: `environment.max_failed_ratio`.
        groups: of a step.
    """

    def __init__(self, ratio: float, groups: int) -> None:
        self._ratio, self._groups = ratio, groups
        self._newest = deque[tuple[int, int]]()  # samples and failures of each group
        self._samples = self._failed = 0
        self._said = ""

    def add(self, group: GroupMeta) -> UserCodeError | None:
        """Return the reason why the run cannot go on after this group, or None."""
        self._count(len(group.samples), len(group.failures))
        self._said = group.failures[-1] if group.failures else self._said
        self._newest.append((len(group.samples), len(group.failures)))
        if len(self._newest) > self._groups:
            samples, failed = self._newest.popleft()
            self._count(-samples, -failed)
        if len(self._newest) < self._groups or self._failed <= self._ratio * self._samples:
            return None
        return UserCodeError(
            f"{self._failed} of the newest {self._samples} samples failed, more than environment.max_failed_ratio = "
            f"{self._ratio:g}; the last: {self._said}"
        )

    def _count(self, samples: int, failed: int) -> None:
        self._samples += samples
        self._failed += failed
