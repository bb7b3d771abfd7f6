"""What a running run is doing, one row per process, from its leases and its newest metrics."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from statistics import fmean

from hpcrl.observe.metrics import MetricsReader
from hpcrl.observe.summary import EVAL_SCORE, REWARD, STEP_SECONDS
from hpcrl.run.layout import Run
from hpcrl.run.lease import Lease, read_leases
from hpcrl.run.ledger import read_attempts

_SILENT_S = 60.0
_PACE_STEPS = 5


@dataclass(frozen=True)
class Row:
    """One process.

    Attributes:
        state: what it last said; a new state is news, a new text may be only a clock that moved.
        text: the state and the numbers that go with it.
        share: of all steps, those that are done; None where this makes no sense.
    """

    process: str
    state: str
    text: str
    share: float | None = None


class Watch:
    """Looks at a run again and again."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._heard: dict[str, tuple[float, float]] = {}
        self._forget()

    def _forget(self) -> None:
        self._reader = MetricsReader(self._run)
        self._pace: deque[float] = deque(maxlen=_PACE_STEPS)
        self._done: int | None = None
        self._reward: float | None = None
        self._scores: dict[int, float] = {}

    def look(self) -> list[Row]:
        """Return the rows of the newest attempt."""
        records, outdated = self._reader.poll()
        if outdated:
            self._forget()
            records, _ = self._reader.poll()
        for record in sorted(records, key=lambda record: record.step):
            if STEP_SECONDS in record.metrics:
                self._pace.append(record.metrics[STEP_SECONDS])
                self._done = record.step
            if EVAL_SCORE in record.metrics:
                self._scores[record.step] = record.metrics[EVAL_SCORE]
            self._reward = record.metrics.get(REWARD, self._reward)
        attempts = read_attempts(self._run)
        if not attempts:
            return [Row("run", "waiting to start", "waiting to start")]
        leases = read_leases(self._run, attempts[-1].number)
        return [self._row(lease) for lease in leases] or [Row("run", "starting", "starting")]

    def _row(self, lease: Lease) -> Row:
        parts, share = [lease.state], None
        if lease.process == "trainer":
            parts += self._trainer()
            total = lease.facts.get("total")
            if total and self._done is not None:
                share = self._done / total
                if self._pace and self._done < total:
                    parts.append(f"ETA {clock(fmean(self._pace) * (total - self._done))}")
        elif lease.process == "controller":
            parts += self._evaluation()
        elif "version" in lease.facts:
            parts.append(f"version {lease.facts['version']}")
        silence = self._silence(lease)
        if silence > _SILENT_S:
            parts.append(f"silent for {clock(silence)}")
        return Row(lease.process, lease.state, " · ".join(parts), share)

    def _trainer(self) -> list[str]:
        reward = [f"reward {self._reward:.2f}"] if self._reward is not None else []
        return reward + ([f"{fmean(self._pace):.1f} s/step"] if self._pace else [])

    def _evaluation(self) -> list[str]:
        if not self._scores:
            return []
        first, last = min(self._scores), max(self._scores)
        scores = [f"{self._scores[step]:.2f} (step {step})" for step in sorted({first, last})]
        return [f"eval {' → '.join(scores)}"]

    def _silence(self, lease: Lease) -> float:
        """Return for how long a lease has not been renewed, by the clock of this machine alone."""
        now = time.monotonic()
        renewed, since = self._heard.get(lease.process, (None, now))
        if renewed != lease.renewed:
            since = now
        self._heard[lease.process] = (lease.renewed, since)
        return now - since


def clock(seconds: float) -> str:
    """Return a duration as 0:53 or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
