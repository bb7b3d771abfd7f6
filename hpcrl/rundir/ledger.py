"""Ledger of a run: its attempts and their outcomes.

An attempt is one start by Slurm (or by the local executor). Node 0's agent opens it; the first process that sees its end writes the outcome.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Literal

from hpcrl.errors import CommitError, RunError
from hpcrl.rundir.commit import children, committed, committed_by, place, write_text
from hpcrl.rundir.layout import Run, position_of
from hpcrl.rundir.records import append_text, as_record, damaged, parse_line, read_object, whole_lines, with_checksum

Kind = Literal["done", "failed", "hang", "cancelled", "interrupted", "lost"]

_DELETE = "delete that line"
_OUTCOME_FILE = re.compile(r"(\d+)\.json", re.ASCII)


@dataclass(frozen=True)
class Attempt:
    """One start of a run.

    Attributes:
        number: 1 for the first start.
        job: key of the start, the same on every node: job id and restart count.
        hosts: names of its nodes, trainers first.
        started: Unix time.
        sizes: of its layout, by the path of the setting, where the configuration has ranges.
        idle: names of nodes that its job has and the layout does not use.
        why: it has these of several sizes, by what the run measured before; empty where it measured nothing.
        returned: names of nodes that its job had at the start and gave back, because the layout does not use them.
    """

    number: int
    job: str
    hosts: list[str]
    started: float
    sizes: dict[str, int] = field(default_factory=dict)
    idle: list[str] = field(default_factory=list)
    why: str = ""
    returned: list[str] = field(default_factory=list)

    @property
    def nodes_at_start(self) -> int:
        return len(self.hosts) + len(self.idle) + len(self.returned)

    @property
    def layout(self) -> str:
        """Its nodes and sizes, for people; empty where the configuration has no ranges."""
        if not self.sizes:
            return ""
        others = {"idle": self.idle, "given back": self.returned}
        unused = "".join(f"; {name}: {', '.join(hosts)}" for name, hosts in others.items() if hosts)
        why = f"; {self.why}" if self.why else ""
        return f"{len(self.hosts)} node(s): {describe_sizes(self.sizes)}{unused}{why}"

    @property
    def job_id(self) -> str:
        """The job of which this is a start."""
        return job_of(self.job)


def describe_sizes(sizes: Mapping[str, int]) -> str:
    """Return the sizes of a layout for people: policy_num_nodes 1, num_engines 3."""
    return ", ".join(f"{path.rpartition('.')[2]} {size}" for path, size in sizes.items())


def job_of(start: str) -> str:
    """Return the job whose start has this key."""
    return start.rpartition(".")[0] or start


@dataclass(frozen=True)
class Outcome:
    """Outcome of an attempt.

    Attributes:
        kind: done, failed (an error), hang (no progress), cancelled (by the user), interrupted (asked to stop, and to be continued).
            Or lost: it ended without an outcome, because it was killed or its node went down.
        message: the first error, or a sentence.
        source: process that reported it.
        ended: Unix time.
        step: of the newest checkpoint then, 0 for none.
        updates: optimizer steps of the next step that it holds too.
        host: node that the error came from, empty where there is none to blame.
    """

    attempt: int
    kind: Kind
    message: str
    source: str
    ended: float
    step: int = 0
    host: str = ""
    updates: int = 0

    @property
    def position(self) -> tuple[int, int]:
        """Committed position of training, which grows with progress."""
        return self.step, self.updates

    @property
    def final(self) -> bool:
        """Return whether the run ended for good."""
        return self.kind in ("done", "cancelled")


def read_attempts(run: Run) -> list[Attempt]:
    """Return all attempts, oldest first; a half-written line is ignored.

    Raises:
        RunError: a line is no attempt, or not the one that was written.
    """
    attempts = [parse_attempt(where, line) for where, line in whole_lines(run.attempts)]
    return sorted(attempts, key=lambda attempt: attempt.number)  # a person may have put a lost one back at the end


def attempts_as_set(run: Run) -> list[Attempt]:
    """Return the attempts with the present settings, oldest first: those since `hpcrl resume` changed some last."""
    attempts = read_attempts(run)
    changed = max((one.number for one in attempts if run.config_of(one.number).is_file()), default=0)
    return [attempt for attempt in attempts if attempt.number > changed]


def parse_attempt(where: str, line: bytes) -> Attempt:
    """Return the attempt of a line of attempts.jsonl."""
    return as_record(Attempt, parse_line(where, line, _DELETE), where, _DELETE)


def require_attempts(run: Run) -> list[Attempt]:
    """Return all attempts, oldest first; look whether later ones than the last of them have left outcomes, checkpoints or logs.

    Without their lines an attempt would begin under the number of an earlier one, whose outcome and files would count as its own.

    Raises:
        RunError: some have, or a line is damaged.
    """
    logs = run.logs(0).parent
    marks = [committed_by(run.checkpoint(*at)) or 0 for at in committed(run.checkpoints, position_of)]
    last = max([*ended_attempts(run), *marks, *(int(name) for name in children(logs) if name.isdecimal())], default=0)
    attempts = read_attempts(run)  # after the traces of attempts, which are younger than their lines
    if last > max((attempt.number for attempt in attempts), default=0):
        line = json.dumps({"number": last, "job": "unknown.0", "hosts": [], "started": 0.0})
        raise RunError(
            f"{run.attempts} does not know attempt {last}, of which there are outcomes, checkpoints or logs. Restore it from a backup, or write "
            f"down that there was one: echo '{line}' >> {shlex.quote(str(run.attempts))}"
        )
    return attempts


def listed_attempts(run: Run) -> list[Attempt]:
    """Return the attempts as `require_attempts`, for a list of many runs: traces are searched only where the next attempt has left some."""
    attempts = read_attempts(run)
    last = max((attempt.number for attempt in attempts), default=0)
    if os.path.exists(run.logs(last + 1)) or max(ended_attempts(run), default=0) > last:
        return require_attempts(run)
    return attempts


def open_attempt(
    run: Run,
    job: str,
    hosts: list[str],
    sizes: Mapping[str, int] = MappingProxyType({}),
    idle: Sequence[str] = (),
    why: str = "",
    returned: Sequence[str] = (),
) -> Attempt:
    """Append the next attempt; those before it that left no outcome are lost. Called by the agent of node 0 alone."""
    attempts, ended = require_attempts(run), ended_attempts(run)
    for earlier in attempts:
        if earlier.number not in ended:
            report_outcome(run, earlier.number, "lost", "it ended without a word", "the next attempt")
    number = attempts[-1].number + 1 if attempts else 1
    attempt = Attempt(number, job, hosts, time.time(), dict(sizes), list(idle), why, list(returned))
    append_text(run.attempts, with_checksum(asdict(attempt))[0] + "\n")
    return attempt


def find_attempt(run: Run, job: str) -> Attempt | None:
    """Return the attempt that the start `job` opened, or None while node 0 has not opened it."""
    return next((attempt for attempt in reversed(read_attempts(run)) if attempt.job == job), None)


def ended_attempts(run: Run) -> list[int]:
    """Return the attempts that have an outcome, ascending; 0 is a run that was cancelled before its first one."""
    return sorted(int(match[1]) for name in children(run.outcomes) if (match := _OUTCOME_FILE.fullmatch(name)))


def read_outcomes(run: Run) -> list[Outcome]:
    """Return how each attempt ended, oldest first."""
    return [outcome for attempt in ended_attempts(run) if (outcome := _read(run, attempt))]


def read_outcome(run: Run) -> Outcome | None:
    """Return how the newest finished attempt ended, or None."""
    ended = ended_attempts(run)
    return outcome_of(run, ended[-1]) if ended else None


def outcome_of(run: Run, attempt: int) -> Outcome | None:
    """Return how attempt `attempt` ended, or None while it runs."""
    return _read(run, attempt) if attempt in ended_attempts(run) else None


def _read(run: Run, attempt: int) -> Outcome | None:
    path, remedy = run.outcome(attempt), f"remove it: attempt {attempt} then counts as one that left no outcome"
    if (value := read_object(path, remedy)) is None:
        return None
    outcome = as_record(Outcome, value, path, remedy)
    if outcome.attempt != attempt:
        raise damaged(path, f"it is the outcome of attempt {outcome.attempt}", remedy)
    return outcome


def report_outcome(run: Run, attempt: int, kind: Kind, message: str, source: str, host: str = "") -> Outcome:
    """Write the outcome of an attempt, unless one is there already: the first report is the cause, later ones are consequences."""
    outcome = _make(run, attempt, kind, message, source, host)
    target = run.outcome(attempt)
    beside = target.with_name(f".{attempt}.{socket.gethostname()}.{os.getpid()}")
    write_text(beside, with_checksum(asdict(outcome))[0])
    place(beside, target)
    return outcome_of(run, attempt) or outcome


def cancel_outcome(
    run: Run, attempt: int, message: str = "cancelled by the user", source: str = "hpcrl cancel"
) -> None:
    """Make cancelled what was interrupted, and waits to be continued."""
    outcome = _make(run, attempt, "cancelled", message, source, "")
    write_text(run.outcome(attempt), with_checksum(asdict(outcome))[0])


def _make(run: Run, attempt: int, kind: Kind, message: str, source: str, host: str) -> Outcome:
    step, updates = max(committed(run.checkpoints, position_of), default=(0, 0))
    return Outcome(attempt, kind, message, source, time.time(), step, host, updates)


def require_newest(run: Run, attempt: int) -> None:
    """Require that `attempt` is still the newest of the run.

    Raises:
        CommitError: a newer one has begun.
    """
    newest = max(read_attempts(run), key=lambda other: other.number, default=None)
    if newest is not None and newest.number > attempt:
        raise CommitError(
            f"attempt {attempt} of {run.name} writes no more: attempt {newest.number} has begun on {', '.join(newest.hosts)}. "
            "End what is left of the older one"
        )
