"""Finding runs by name, and what state each is in."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrl.errors import RunError
from hpcrl.launch.scheduler import GONE, JobState, local_state, slurm_states
from hpcrl.run.commit import read_json
from hpcrl.run.layout import Run
from hpcrl.run.lease import Lease, read_leases
from hpcrl.run.ledger import Outcome, read_attempts, read_outcome

_MOST_LISTED = 8


def default_root() -> Path:
    """Return where runs are looked for: $HPCRL_ROOT, else ./runs, the default of slurm.root."""
    return Path(os.environ.get("HPCRL_ROOT", "runs"))


def all_runs(root: Path) -> list[Run]:
    """Return every run under `root`, by project and name."""
    return [Run(path.parent.absolute()) for path in sorted(root.glob("*/[!.]*/config.toml"))]


def find_run(name: str, root: Path) -> Run:
    """Return the run of this name, `project/name` or path; a name may be cut off before a dash, as NAME.0 is of NAME.0-seed-1.

    Raises:
        RunError: none, or several, match.
    """
    if (Path(name) / "config.toml").is_file():
        return Run.open(name)
    names = {run: (run.name, f"{run.project}/{run.name}") for run in all_runs(root)}
    exact = [run for run, own in names.items() if name in own]
    matches = exact or [run for run, own in names.items() if any(other.startswith(f"{name}-") for other in own)]
    if len(matches) == 1:
        return matches[0]
    if exact:
        raise RunError(f"several runs are called {name}: {_listed(matches)}; name one with its project")
    if matches:
        raise RunError(f"several runs begin with {name}-: {_listed(matches)}; write more of the name")
    near = [run for run, own in names.items() if any(other.startswith(name) for other in own)]
    hint = f"; runs that begin so: {_listed(near)}" if near else ""
    raise RunError(
        f"no run {name!r} under {root.absolute()}{hint}; give its path, or --root, or set HPCRL_ROOT. `hpcrl status` lists the "
        "runs there"
    )


def _listed(runs: Sequence[Run]) -> str:
    shown = [f"{run.project}/{run.name}" for run in runs[:_MOST_LISTED]]
    return ", ".join([*shown, f"and {len(runs) - len(shown)} more"] if len(runs) > len(shown) else shown)


@dataclass(frozen=True)
class RunState:
    """A run as a person wants to see it.

    Attributes:
        word: pending, starting, running, ending (its outcome is known, its processes leave), done, failed, cancelled, interrupted,
            or lost (it ended without an outcome).
        detail: the pending reason, the first error, or what the trainer does.
    """

    run: Run
    submission: dict[str, Any]
    job: JobState
    attempt: int
    outcome: Outcome | None
    leases: list[Lease]
    word: str
    detail: str

    @property
    def over(self) -> bool:
        return not self.job.active and self.word not in ("pending", "starting", "running", "ending")


def states_of(runs: Sequence[Run]) -> list[RunState]:
    """Return the state of each run, asking the scheduler once for all of them."""
    submissions = [read_json(run.submission) or {} for run in runs]
    jobs = slurm_states([s["job_id"] for s in submissions if s.get("executor") == "slurm"])
    states = []
    for run, submission in zip(runs, submissions, strict=True):
        local = submission.get("executor") == "local"
        job = _local(submission) if local else jobs.get(submission.get("job_id", ""), GONE)
        states.append(_state(run, submission, job))
    return states


def _local(submission: dict[str, Any]) -> JobState:
    host = submission["host"]
    if host != socket.gethostname():
        raise RunError(f"this run was started with --local on {host}; ask there")
    return local_state(submission["job_id"])


def _starts(submission: dict[str, Any], job: str) -> set[str]:
    """Return the keys by which attempts of this submission go: the job's id, and for Slurm the number of its restarts."""
    identity = submission.get("job_id", "")
    return {f"local-{identity}", f"{identity}.{job.rpartition('.')[2]}"}


def _state(run: Run, submission: dict[str, Any], job: JobState) -> RunState:
    attempts = read_attempts(run)
    attempt = attempts[-1] if attempts else None
    number = attempt.number if attempt else 0
    outcome = read_outcome(run)
    current = outcome if outcome and outcome.attempt == number else None
    leases = read_leases(run, number)
    queued_again = attempt is not None and attempt.job not in _starts(submission, attempt.job)
    if current and current.ended > submission.get("submitted", 0.0) and not job.active:
        queued_again = False  # cancelled in the queue
    if job.active and (job.name == "PENDING" or attempt is None or queued_again or current):
        word = "pending" if job.name == "PENDING" else "starting" if current is None else "ending"
        detail = job.reason or (f"{current.kind}: {current.message}" if current else "")
    elif current and not queued_again:
        word, detail = current.kind, current.message
    elif job.active:
        trainer = next((lease for lease in leases if lease.process == "trainer"), None)
        word, detail = "running", trainer.state if trainer else "starting"
    else:
        word = "lost"
        detail = f"the job is gone ({job.name.lower()}) and left no outcome; `hpcrl resume {run.name}` continues it"
        if not submission:
            detail = "its submission was cut short; submit it again under another name"
    return RunState(run, submission, job, number, current, leases, word, detail)
