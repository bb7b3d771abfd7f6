"""What happened to a run: its attempts and how each ended.

An attempt is one start by Slurm (or by the local executor). Node 0's agent opens it; whoever first sees the end writes the outcome.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from typing import Literal

from hpcrl.run.commit import read_json, write_json
from hpcrl.run.layout import Run

Kind = Literal["done", "failed", "cancelled", "interrupted"]


@dataclass(frozen=True)
class Attempt:
    """One start of a run.

    Attributes:
        number: 1 for the first start.
        job: key of the start, the same on every node: job id and restart count.
        hosts: node names, trainers first.
        started: Unix time.
    """

    number: int
    job: str
    hosts: list[str]
    started: float


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended.

    Attributes:
        kind: done, failed (an error), cancelled (by the user) or interrupted (saved and to be resumed).
        message: the first error, or a sentence.
        source: process that reported it.
        ended: Unix time.
    """

    attempt: int
    kind: Kind
    message: str
    source: str
    ended: float


def read_attempts(run: Run) -> list[Attempt]:
    """Return all attempts, oldest first; a half-written last line is ignored."""
    attempts = []
    for line in run.attempts.read_text().splitlines() if run.attempts.is_file() else []:
        try:
            attempts.append(Attempt(**json.loads(line)))
        except json.JSONDecodeError:
            continue
    return attempts


def open_attempt(run: Run, job: str, hosts: list[str]) -> Attempt:
    """Append the next attempt. Called by the agent of node 0 alone."""
    attempts = read_attempts(run)
    attempt = Attempt(attempts[-1].number + 1 if attempts else 1, job, hosts, time.time())
    whole = not run.attempts.is_file() or run.attempts.read_text().endswith("\n")
    with run.attempts.open("a") as file:
        file.write(("" if whole else "\n") + json.dumps(asdict(attempt)) + "\n")
        file.flush()
        os.fsync(file.fileno())
    return attempt


def find_attempt(run: Run, job: str) -> Attempt | None:
    """Return the attempt that the start `job` opened, or None while node 0 has not opened it."""
    return next((attempt for attempt in reversed(read_attempts(run)) if attempt.job == job), None)


def read_outcome(run: Run) -> Outcome | None:
    """Return how the newest finished attempt ended, or None."""
    value = read_json(run.outcome)
    return Outcome(**value) if value else None


def outcome_of(run: Run, attempt: int) -> Outcome | None:
    """Return how attempt `attempt` ended, or None while it runs."""
    outcome = read_outcome(run)
    return outcome if outcome and outcome.attempt == attempt else None


def report_outcome(run: Run, attempt: int, kind: Kind, message: str, source: str) -> Outcome:
    """Write the outcome of an attempt, unless one is there already: the first report is the cause, later ones are consequences."""
    existing = read_outcome(run)
    if existing and existing.attempt >= attempt:
        return existing
    outcome = Outcome(attempt, kind, message, source, time.time())
    write_json(run.outcome, asdict(outcome))
    return outcome
