"""What the scheduler says of jobs: squeue first, sacct for jobs that squeue has forgotten, where there is accounting."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcrl.errors import SubmitError

_ACTIVE = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "REQUEUE_HOLD", "STOPPED")


@dataclass(frozen=True)
class JobState:
    """State of one job.

    Attributes:
        name: Slurm's word, or RUNNING or GONE for a local job.
        reason: why it is pending, or empty.
    """

    name: str
    reason: str = ""

    @property
    def active(self) -> bool:
        return self.name in _ACTIVE


_ANSWER_S = 60
GONE = JobState("GONE")


def _ask_slurm(command: Sequence[str]) -> str:
    """Return what a command of Slurm prints.

    Raises:
        SubmitError: it is not there, fails, or gives no answer: a job must not pass for gone because nobody could say.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_ANSWER_S)
    except FileNotFoundError:
        raise SubmitError(f"{command[0]} was not found: ask for runs of Slurm on a node of its cluster") from None
    except subprocess.TimeoutExpired:
        raise SubmitError(f"{command[0]} gave no answer in {_ANSWER_S} s; the state of the jobs is unknown") from None
    if done.returncode != 0:
        raise SubmitError(f"{command[0]}: {done.stderr.strip()}; the state of the jobs is unknown")
    return done.stdout


def slurm_states(jobs: Sequence[str]) -> dict[str, JobState]:
    """Return the state of each job; one that Slurm no longer knows is GONE.

    Raises:
        SubmitError: Slurm could not be asked.
    """
    states = dict.fromkeys(jobs, GONE)
    if not jobs:
        return states
    me = str(os.getuid())
    for line in _ask_slurm(["squeue", "-h", "-a", "-r", "-t", "all", "-u", me, "-o", "%i|%T|%r"]).splitlines():
        job, state, reason = line.split("|", 2)
        if job in states:
            states[job] = JobState(state, reason if reason not in ("None", "") else "")
    missing = [job for job, state in states.items() if state is GONE]
    if missing:
        for line in _accounting(missing):
            job, _, state = line.partition("|")
            if job in states and state:
                states[job] = JobState(state.split()[0])
    return states


def _accounting(jobs: Sequence[str]) -> list[str]:
    try:
        return _ask_slurm(["sacct", "-n", "-X", "-P", "-o", "JobID,State", "-j", ",".join(jobs)]).splitlines()
    except SubmitError:  # a cluster need not have accounting
        return []


def local_state(job: str) -> JobState:
    """Return whether the local executor's process still runs."""
    try:
        command = Path(f"/proc/{job}/cmdline").read_bytes()
    except OSError:
        return GONE
    return JobState("RUNNING") if b"submitit" in command else GONE


def cancel_slurm(job: str) -> None:
    """Cancel a Slurm job.

    Raises:
        SubmitError: scancel refused.
    """
    done = subprocess.run(["scancel", job], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SubmitError(f"scancel {job}: {done.stderr.strip()}")
