"""Reads the live status of a run: one row per process, and its curves, from process statuses and the newest metrics."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from hpcrl.errors import ConfigError
from hpcrl.observe.advice import advise
from hpcrl.observe.goodput import account_of
from hpcrl.observe.metrics import MetricsReader
from hpcrl.observe.summary import REWARD, TOKENS_PER_SECOND
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import read_attempts
from hpcrl.runtime.process_status import ProcessStatus, read_process_statuses
from hpcrl.units import duration, readable_size

_SILENT_S = 60.0
_LASTING_S = 5.0
_ADVISED_S = 60.0
_SLOW = ("starting engine", "loading model", "loading data")
_LOSS, _HOST, _DEVICE = "policy/final_loss", "memory/peak_host_gib", "memory/peak_device_gib"
_GIB = 2**30


@dataclass(frozen=True)
class ProcessRow:
    """State of one process.

    Attributes:
        state: of its process status; a change of it is printed, a change of the notes is not.
        notes: version, memory, time in its state, time since its last heartbeat.
    """

    process: str
    state: str
    notes: Sequence[str] = ()

    @property
    def text(self) -> str:
        return " · ".join([self.state, *self.notes])


@dataclass(frozen=True)
class LiveStatus:
    """Status of a run at one moment.

    Attributes:
        rows: its processes, those of the newest attempt.
        curve: reward by step, or the loss where there are no rewards.
        is_reward: which of the two.
        tokens_per_second: of the newest step.
        waits: for what its roles wait, with advice; renewed once in a while.
        goodput: what its nodes did, as of an `Account`; renewed as the waits, empty where no node is recorded.
        peaks: the most memory that a rank of the trainer needed, on its host and on its GPU, as far as they were reported.
    """

    rows: list[ProcessRow]
    curve: list[float] = field(default_factory=list)
    is_reward: bool = True
    tokens_per_second: float | None = None
    peaks: list[str] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)
    goodput: str = ""


class LiveStatusReader:
    """Reads the status of a run repeatedly, and keeps its curves."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._renewed: dict[str, tuple[float, float]] = {}
        self._since: dict[str, tuple[str, float]] = {}
        self._waits, self._goodput, self._advised = list[str](), "", -math.inf
        self._reset()

    def _reset(self) -> None:
        self._reader = MetricsReader(self._run, REWARD, _LOSS, TOKENS_PER_SECOND, _HOST, _DEVICE)
        self._curves: dict[str, dict[int, float]] = {REWARD: {}, _LOSS: {}}
        self._newest: dict[str, float] = {}

    def read(self) -> LiveStatus:
        """Return the present status."""
        records, outdated = self._reader.poll()
        if outdated:
            self._reset()
            records, _ = self._reader.poll()
        for record in sorted(records, key=lambda record: record.step):
            self._newest |= record.metrics
            for name, curve in self._curves.items():
                if name in record.metrics:
                    curve[record.step] = record.metrics[name]
        self._renew_advice()
        rewards, losses = (list(curve.values()) for curve in self._curves.values())
        return LiveStatus(
            rows=self._rows(),
            curve=rewards or losses,
            is_reward=bool(rewards) or not losses,
            tokens_per_second=self._newest.get(TOKENS_PER_SECOND),
            peaks=[
                f"{where} {readable_size(self._newest[name] * _GIB)}"
                for name, where in ((_HOST, "host"), (_DEVICE, "GPU"))
                if name in self._newest
            ],
            waits=self._waits,
            goodput=self._goodput,
        )

    def _renew_advice(self) -> None:
        """Renew advice and account where they are more than a minute old: they read the timelines of all replicas."""
        now = time.monotonic()
        if now - self._advised > _ADVISED_S:
            with suppress(ConfigError):  # written by another hpcrl
                advised = advise(self._run)
                self._waits = list(advised.lines()) if advised else []
            self._goodput = str(account_of(self._run) or "")
            self._advised = now

    def _rows(self) -> list[ProcessRow]:
        attempts = read_attempts(self._run)
        statuses = read_process_statuses(self._run, attempts[-1].number) if attempts else []
        return [self._row(status) for status in statuses]

    def _row(self, status: ProcessStatus) -> ProcessRow:
        notes = []
        version = status.facts.get("version")
        if version is not None and f"v{version}" not in status.state and status.process != "controller":
            notes.append(f"version {version}")
        lasting = self._lasting(status)
        if status.state in _SLOW and lasting >= _LASTING_S:
            notes.append(f"for {duration(lasting)}")
        silence = self._silence(status)
        if silence > _SILENT_S:
            notes.append(f"silent for {duration(silence)}")
        if status.resident and status.process.startswith("agent-"):
            whole = readable_size(status.resident)
            notes.append(f"{readable_size(status.own)} ({whole} with the processes that it started)")
        elif status.resident:
            notes.append(readable_size(status.resident))
        return ProcessRow(status.process, status.state, [*notes, *filter(None, [status.host])])

    def _lasting(self, status: ProcessStatus) -> float:
        state, since = self._since.get(status.process, ("", 0.0))
        if state != status.state:
            since = time.monotonic()
        self._since[status.process] = (status.state, since)
        return time.monotonic() - since

    def _silence(self, status: ProcessStatus) -> float:
        """Return for how long a process status has not been renewed: at the first look by its writer's clock, then by this machine's alone."""
        now = time.monotonic()
        first = status.renewed, now - max(0.0, time.time() - status.renewed)
        renewed, since = self._renewed.get(status.process, first)
        if renewed != status.renewed:
            since = now
        self._renewed[status.process] = (status.renewed, since)
        return now - since
