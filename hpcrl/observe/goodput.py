"""Accounts for the node seconds of runs: from allocations, timelines, commits and what became of groups.

Goodput is the share that made the policy: training that was committed, generation that was trained, scoring. Of a living run, what it has not
committed yet counts as if it were.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import takewhile
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

from hpcrl.errors import RunError
from hpcrl.observe.metrics import Record, last_records
from hpcrl.observe.node_seconds import (
    CATEGORIES,
    GENERATED,
    IDLE_NODES,
    KILLED,
    LOST,
    SCORED,
    TRAINED,
    UNFINISHED,
    UNRECORDED,
    Held,
    Seconds,
    Use,
    node_seconds,
)
from hpcrl.observe.timeline import FIRST_RANK, Span, process_lines, recent_spans, span_of
from hpcrl.rundir.allocations import SILENT_S, Allocation, read_allocations
from hpcrl.rundir.commit import committed
from hpcrl.rundir.layout import Run, attempt_of, position_of
from hpcrl.rundir.ledger import Outcome, read_attempts, read_outcomes
from hpcrl.rundir.records import is_time
from hpcrl.rundir.starts import read_starts
from hpcrl.units import duration

SAMPLE_BATCHES = "generate/sample_batches"
"""Metric of a step: groups that were generated for it, as a multiple of those that it trains."""
_GOOD = (TRAINED, GENERATED, SCORED)
_ALL_STEPS = 1 << 60
_UNWRITTEN_S, _LEAST_S = 3.0, 10.0


@dataclass(frozen=True)
class RoleAccount:
    """Node seconds of one role in one attempt.

    Attributes:
        attempt: 0: of elements of elastic pools, in all attempts.
        nodes: how many there were.
    """

    run: str
    attempt: int
    role: str
    nodes: int
    seconds: Seconds


@dataclass(frozen=True)
class Account:
    """Account of a run, or of several.

    Attributes:
        queued: seconds in the queue without any nodes; of several requests that wait at once, once.
    """

    rows: list[RoleAccount]
    queued: float = 0.0

    def __add__(self, other: Account) -> Account:
        return Account([*self.rows, *other.rows], self.queued + other.queued)

    @cached_property
    def uses(self) -> Seconds:
        """Node seconds of each use."""
        found: Seconds = {}
        for row in self.rows:
            for use, seconds in row.seconds.items():
                found[use] = found.get(use, 0.0) + seconds
        return found

    @property
    def total(self) -> float:
        """Node seconds of the allocations."""
        return sum(self.uses.values())

    @property
    def goodput(self) -> float:
        """Share of the node seconds that made the policy, between 0 and 1."""
        return sum(map(self.share, _GOOD))

    def share(self, category: str) -> float:
        """Return which share of the node seconds a category has, between 0 and 1."""
        return sum(seconds for use, seconds in self.uses.items() if use[0] == category) / (self.total or 1.0)

    def parts(self, category: str) -> list[tuple[str, float]]:
        """Return for what a category's time went, with shares of all node seconds, the largest first."""
        own = [(use[1], seconds / (self.total or 1.0)) for use, seconds in self.uses.items() if use[0] == category]
        return sorted((part for part in own if part[0]), key=lambda part: -part[1])

    def __str__(self) -> str:
        """Return goodput, and the categories that have a hundredth or more of the time, in one line."""
        shares = [(category, self.share(category)) for category in CATEGORIES]
        named = ", ".join(f"{category} {share:.0%}" for category, share in shares if share >= 0.01)
        queue = f"; {duration(self.queued)} in the queue" if self.queued >= 1 else ""
        return f"{self.goodput:.0%} of {node_time(self.total)}: {named}{queue}"

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        return {
            "goodput": self.goodput,
            "node_seconds": self.total,
            "queued_seconds": self.queued,
            "shares": {category: self.share(category) for category in CATEGORIES},
            "parts": {category: dict(parts) for category in CATEGORIES if (parts := self.parts(category))},
            "rows": [
                {**asdict(row), "seconds": [[*use, seconds] for use, seconds in row.seconds.items()]}
                for row in self.rows
            ],
        }


def node_time(seconds: float) -> str:
    """Return node seconds in words: as node hours where there is one."""
    for unit, size in (("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= size:
            return f"{seconds / size:,.1f} node {unit}"
    return f"{seconds:.1f} node seconds"


def account_of(run: Run, now: float | None = None) -> Account | None:
    """Return the account of all attempts of a run; None where no allocation of it is recorded.

    Args:
        now: Unix time; None: of this machine.

    Raises:
        RunError: a file of the run is damaged.
    """
    allocations = read_allocations(run)
    if not allocations:
        return None
    history = _History(run, allocations, time.time() if now is None else now)
    processes = set().union(*map(_processes, allocations))
    folders = sorted(number for path in run.timelines.glob("*") if (number := attempt_of(path)) is not None)
    spans = {
        process: [span for attempt in folders for span in _spans(run, attempt, process, history.goes_on(attempt))]
        for process in processes | {FIRST_RANK}
    }
    return _account(run, history, spans)


def _processes(allocation: Allocation) -> set[str]:
    return {process for node in allocation.hosts for own in node.devices for process in own}


def account_since(run: Run, attempt: int, since: float, until: float) -> Account | None:
    """Return the account of a living attempt between two moments, without reading what lies before them."""
    own = {one.job for one in read_attempts(run) if one.number == attempt}
    living = [
        replace(one, until=until)
        for one in read_allocations(run)
        if not one.over and one.start < until and (one.job in own or (one.pool and until - one.until <= SILENT_S))
    ]
    if not living:
        return None
    history = _History(run, living, until)
    processes = set().union(*map(_processes, living))
    spans = {process: _recent(run, attempt, process, since, until) for process in processes}
    return _account(run, history, spans, since)


class GoodputMeter:
    """Measures what the nodes of a living attempt did between commits.

    Each call looks at the time since the one before, up to what processes have written by now.
    """

    def __init__(self, run: Run, attempt: int) -> None:
        self._run, self._attempt, self._since = run, attempt, time.time()

    def shares(self) -> dict[str, float]:
        """Return goodput/* of the recorded node seconds since the last call that returned some; empty where too few are recorded."""
        until = time.time() - _UNWRITTEN_S
        if until - self._since < _LEAST_S:
            return {}
        try:
            account = account_since(self._run, self._attempt, self._since, until)
        except (RunError, OSError) as error:
            print(f"no account of the nodes: {error}", flush=True)
            return {}
        recorded = 1 - account.share(UNRECORDED) if account else 0.0
        if account is None or recorded <= 0:
            return {}
        self._since = until
        shares = {category: account.share(category) / recorded for category in CATEGORIES if category != UNRECORDED}
        return {"goodput/total": account.goodput / recorded} | {
            f"goodput/{name}": share for name, share in shares.items()
        }


def _recent(run: Run, attempt: int, process: str, since: float, until: float) -> list[Span]:
    newest = takewhile(lambda span: span.end > since, recent_spans(run, attempt, process))
    own = [replace(span, end=min(span.end, until)) for span in newest if span.start < until]
    return sorted(own, key=lambda span: span.start)


class _History:
    """Allocations of a run and what became of its attempts."""

    def __init__(self, run: Run, allocations: Sequence[Allocation], now: float) -> None:
        attempts = read_attempts(run)
        self.allocations = allocations
        self._attempts = {attempt.job: attempt.number for attempt in attempts}
        self.jobs = {attempt.number: attempt.job for attempt in attempts}
        self._outcomes = {outcome.attempt: outcome for outcome in read_outcomes(run)}
        self._living = {one.job for one in allocations if not one.over and now - one.until <= SILENT_S}
        self._committed = max(committed(run.checkpoints, position_of), default=None)
        begun = {line["attempt"]: line["from"] for line in read_starts(run) if "from" in line}
        self._begun = {attempt: _after(position_of(Path(name)) if name else None) for attempt, name in begun.items()}

    def attempt(self, allocation: Allocation) -> int:
        return 0 if allocation.pool else self._attempts.get(allocation.job, 0)

    def goes_on(self, attempt: int) -> bool:
        """Return whether nothing of an attempt is lost so far: it lives, or has finished the run."""
        outcome = self._outcomes.get(attempt)
        return outcome.kind == "done" if outcome else self.jobs.get(attempt) in self._living

    def kept(self, attempt: int) -> int:
        """Return the last step of an attempt that no later one trains again."""
        later = [step for number, step in self._begun.items() if number > attempt]
        if later or self.goes_on(attempt):
            return min(later, default=_ALL_STEPS)
        outcome = self._outcomes.get(attempt)
        return _after(outcome.position if outcome else self._committed)

    def after(self, allocation: Allocation) -> Use:
        """Return the use of a node's time after its processes have ended."""
        outcome: Outcome | None = self._outcomes.get(self.attempt(allocation))
        if allocation.job in self._living and outcome is None:
            return UNRECORDED, ""
        ended_well = outcome is not None and outcome.kind in ("done", "interrupted", "cancelled")
        return (
            (IDLE_NODES, "between attempts")
            if allocation.pool
            else (IDLE_NODES, "its end")
            if ended_well
            else (LOST, KILLED)
        )


def _after(position: tuple[int, int] | None) -> int:
    """Return the last step of which a checkpoint holds anything: one within a step was made where the attempt stopped."""
    step, updates = position or (0, 0)
    return step + (updates > 0)


def _account(run: Run, history: _History, spans: Mapping[str, Sequence[Span]], since: float = 0.0) -> Account:
    held, waits = list[Held](), list[tuple[float, float, float]]()
    for one in history.allocations:
        attempt, after, end = history.attempt(one), history.after(one), _end(one, history.attempt(one), spans)
        start = max(one.start, since)
        held += [
            Held(attempt, _role(one, node.role), start, max(start, node.until or end), node.devices, after, node.lends)
            for node in one.hosts
        ]
        if not one.pool:
            waits.append((one.queued, one.start, end))
    attempts = {node.attempt for node in held} | {span.attempt for own in spans.values() for span in own}
    shares = _trained_shares(run)
    found = node_seconds(held, spans, {attempt: history.kept(attempt) for attempt in attempts}, shares)
    nodes = defaultdict[tuple[int, str], int](int)
    for node in held:
        nodes[node.attempt, node.role] += 1
    name = f"{run.project}/{run.name}"
    rows = [
        RoleAccount(name, *key, nodes[key], seconds) for key, seconds in sorted(found.items(), key=lambda row: row[0])
    ]
    return Account(rows, _queued(waits))


def _queued(waits: Iterable[tuple[float, float, float]]) -> float:
    """Return the seconds in which a start waited and none was held.

    Args:
        waits: of each start when it was queued, 0 if that is not known, when it began, and when it ended.
    """
    changes = list[tuple[float, int, int]]()
    for queued, start, end in waits:
        changes += [(start, 0, 1), (max(start, end), 0, -1)]
        if 0 < queued < start:
            changes += [(queued, 1, 0), (start, -1, 0)]
    seconds, before, waiting, held = 0.0, 0.0, 0, 0
    for at, more_waiting, more_held in sorted(changes):
        seconds += (at - before) * (waiting > 0 and not held)
        before, waiting, held = at, waiting + more_waiting, held + more_held
    return seconds


def _role(allocation: Allocation, role: str) -> str:
    return f"{role} pool" if allocation.pool else role


def _end(allocation: Allocation, attempt: int, spans: Mapping[str, Sequence[Span]]) -> float:
    """Return the end of an allocation: of one that was killed, the last time at which it was renewed or one of its processes worked."""
    if allocation.over or allocation.pool:
        return allocation.until
    own = (span.end for process in _processes(allocation) for span in spans[process] if span.attempt == attempt)
    return max(allocation.until, max(own, default=0.0))


def _trained_shares(run: Run) -> dict[int, float]:
    """Return by attempt the share of the finished groups that its batches trained; of all attempts under 0."""
    found = defaultdict[int, list[float]](list)
    for record in last_records(run, "controller", SAMPLE_BATCHES, _is_finite, _ALL_STEPS):
        for attempt in (record.attempt, 0):
            found[attempt].append(record.metrics[SAMPLE_BATCHES])
    return {attempt: 1 / max(1.0, fmean(values)) for attempt, values in found.items()}


def _is_finite(record: Record) -> bool:
    return isfinite(record.metrics[SAMPLE_BATCHES])


def _spans(run: Run, attempt: int, process: str, goes_on: bool) -> Iterator[Span]:
    """Yield the spans of a process in an attempt, with what a replica generated for groups that it never finished as UNFINISHED.

    Args:
        goes_on: what the newest of its processes was generating is no loss.
    """
    found, begun, finished = list[Span](), 0, 0.0
    for line in process_lines(run, attempt, process):
        if is_time(line.get("finished")):
            finished = max(finished, line["finished"])
        elif "process" in line:
            found[begun:] = _cut(found[begun:], finished)
            begun, finished = len(found), 0.0
        elif (span := span_of(line, process, attempt)) is not None:
            found.append(span)
    if not goes_on:
        found[begun:] = _cut(found[begun:], finished)
    yield from sorted(found, key=lambda span: span.start)


def _cut(spans: Iterable[Span], finished: float) -> Iterator[Span]:
    for span in spans:
        if span.phase != "generate" or span.end <= finished:
            yield span
        elif span.start >= finished:
            yield replace(span, phase=UNFINISHED)
        else:
            yield replace(span, end=finished)
            yield replace(span, start=finished, phase=UNFINISHED)
