"""What a running run is doing, one row per process, from its process statuses and its newest metrics."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from statistics import fmean

from hpcrl.observe.metrics import MetricsReader
from hpcrl.observe.summary import EVAL_SCORE, REWARD, STEP_SECONDS
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import read_attempts
from hpcrl.runtime.process_status import ProcessStatus, read_process_statuses
from hpcrl.units import duration

_SILENT_S = 60.0
_PACE_STEPS = 5
_LASTING_S = 5.0
_SLOW = ("starting engine", "loading model", "loading data")
_LEFT = ("finished", "stopped")


@dataclass(frozen=True)
class ProcessRow:
    """One process.

    Attributes:
        state: of its process status; a change of it is printed, a change of the text may be only a clock that moved.
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
        self._since: dict[str, tuple[str, float]] = {}
        self._forget()

    def _forget(self) -> None:
        self._reader = MetricsReader(self._run, EVAL_SCORE, REWARD, STEP_SECONDS)
        self._pace: deque[float] = deque(maxlen=_PACE_STEPS)
        self._begun: set[int] = set()
        self._done: int | None = None
        self._reward: float | None = None
        self._scores: dict[int, float] = {}

    def look(self) -> list[ProcessRow]:
        """Return the rows of the newest attempt."""
        records, outdated = self._reader.poll()
        if outdated:
            self._forget()
            records, _ = self._reader.poll()
        for record in sorted(records, key=lambda record: record.step):
            if STEP_SECONDS in record.metrics:
                if record.attempt in self._begun:  # the first step of an attempt waits for engines to start
                    self._pace.append(record.metrics[STEP_SECONDS])
                self._begun.add(record.attempt)
                self._done = record.step
            if EVAL_SCORE in record.metrics:
                self._scores[record.step] = record.metrics[EVAL_SCORE]
            self._reward = record.metrics.get(REWARD, self._reward)
        attempts = read_attempts(self._run)
        if not attempts:
            return [ProcessRow("run", "waiting to start", "waiting to start")]
        statuses = read_process_statuses(self._run, attempts[-1].number)
        return [self._row(status) for status in statuses] or [ProcessRow("run", "starting", "starting")]

    def _row(self, status: ProcessStatus) -> ProcessRow:
        parts, share = [status.state], None
        if status.process == "trainer":
            total = status.facts.get("total")
            if total and "/" not in status.state and status.state not in _LEFT:
                parts.append(f"step {status.facts.get('step', 0)}/{total}")
            parts += self._trainer()
            if total and self._done is not None:
                share = self._done / total
                if self._pace and self._done < total:
                    parts.append(f"ETA {duration(fmean(self._pace) * (total - self._done))}")
        elif status.process == "controller":
            parts += self._evaluation()
        elif "version" in status.facts:
            parts.append(f"version {status.facts['version']}")
        lasting = self._lasting(status)
        if status.state in _SLOW and lasting >= _LASTING_S:
            parts.append(f"for {duration(lasting)}")
        silence = self._silence(status)
        if silence > _SILENT_S:
            parts.append(f"silent for {duration(silence)}")
        return ProcessRow(status.process, status.state, " · ".join(parts), share)

    def _trainer(self) -> list[str]:
        reward = [f"reward {self._reward:.2f}"] if self._reward is not None else []
        return reward + ([f"{fmean(self._pace):.1f} s/step"] if self._pace else [])

    def _evaluation(self) -> list[str]:
        if not self._scores:
            return []
        first, last = min(self._scores), max(self._scores)
        scores = [f"{self._scores[step]:.2f} (step {step})" for step in sorted({first, last})]
        return [f"eval {' → '.join(scores)}"]

    def _lasting(self, status: ProcessStatus) -> float:
        """Return for how long a process has been in its state, as far as that was watched."""
        state, since = self._since.get(status.process, ("", 0.0))
        if state != status.state:
            since = time.monotonic()
        self._since[status.process] = (status.state, since)
        return time.monotonic() - since

    def _silence(self, status: ProcessStatus) -> float:
        """Return for how long a process status has not been renewed, by the clock of this machine alone."""
        now = time.monotonic()
        renewed, since = self._heard.get(status.process, (None, now))
        if renewed != status.renewed:
            since = now
        self._heard[status.process] = (status.renewed, since)
        return now - since
