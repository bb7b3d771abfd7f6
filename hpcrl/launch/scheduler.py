"""Reads states of jobs: squeue first, sacct for jobs that squeue has forgotten, where there is accounting."""

from __future__ import annotations

import os
import pwd
import re
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcrl.errors import SubmitError

PATIENCE_S = 120.0
"""For how long commands that change something wait for a slurmctld that is away, being restarted for instance."""
AWAY = (
    "Unable to contact slurm controller",
    "Socket timed out",
    "Connection refused",
    "Zero Bytes",
    "timed out",
    "Unexpected message received",  # printed by `scontrol requeue` and `update` of an array's element
)
_RETRY_S = 2.0
_ANSWER_S, _GLANCE_S = 60.0, 10.0
_ACCOUNTING_S = 15.0
_WAITING = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")
_ACTIVE = (*_WAITING, "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")  # fmt: skip


@dataclass(frozen=True)
class JobState:
    """State of one job.

    Attributes:
        name: Slurm's name of it, or RUNNING or GONE for a local job, or UNKNOWN.
        reason: why it is pending, or unknown; or empty.
        start: when it started, or may start; local time in ISO form, or empty.
        script: the batch script, or empty.
    """

    name: str
    reason: str = ""
    start: str = ""
    script: str = ""

    @property
    def active(self) -> bool:
        return self.name in _ACTIVE

    @property
    def waiting(self) -> bool:
        return self.name in _WAITING

    @property
    def known(self) -> bool:
        return self.name != "UNKNOWN"


GONE = JobState("GONE")
_QUEUED = re.compile(r"(\d+(?:_[^|]+)?)\|([A-Z_]+)\|([^|]*)\|([^|]*)\|(.*)", re.ASCII)
_JOB = re.compile(r"\d+(_\d+)?", re.ASCII)


def run_slurm(command: Sequence[str], patience_s: float, limit_s: float = _ANSWER_S, folder: str | None = None) -> str:
    """Return the output of a Slurm command.

    Args:
        patience_s: for how long it is repeated while slurmctld does not answer; reported on the standard error.
        folder: its working directory; None: this process's own.

    Raises:
        SubmitError: it is not there, fails, or gives no answer.
    """
    deadline, reported = time.monotonic() + patience_s, False
    while True:
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", check=False, timeout=limit_s, cwd=folder
            )
        except FileNotFoundError:
            raise not_here(command[0]) from None
        except subprocess.TimeoutExpired:
            complaint = f"no answer in {limit_s:.0f} s (timed out)"
        else:
            if done.returncode == 0:
                return done.stdout
            complaint = done.stderr.strip()
        if not is_away(complaint) or time.monotonic() > deadline:
            raise SubmitError(f"{command[0]}: {complaint}")
        if not reported:
            print(f"hpcrl: {command[0]}: {complaint}; asking again for {patience_s:.0f} s", file=sys.stderr, flush=True)
            reported = True
        time.sleep(_RETRY_S)


def not_here(program: str) -> SubmitError:
    """Return the error of a missing Slurm program."""
    return SubmitError(f"{program} was not found: ask for runs of Slurm on a node of its cluster")


def is_away(complaint: str) -> bool:
    """Return whether a complaint of Slurm means that slurmctld may answer later."""
    return any(text in complaint for text in AWAY)


def queue(patience_s: float, others: Iterable[int] = ()) -> dict[str, JobState]:
    """Return the jobs of this user that Slurm still knows, those that ended a few minutes ago too. Raises SubmitError where Slurm could not be asked.

    Args:
        patience_s: for how long a slurmctld that is away is asked; 0: once, and its answer is awaited for 10 s only.
        others: ids of further users; Slurm may hide their jobs.
    """
    limit_s = _ANSWER_S if patience_s else _GLANCE_S
    asked = ["squeue", "-h", "-a", "-r", "-t", "all"]
    try:
        printed = run_slurm([*asked, "-u", str(os.getuid()), "-o", "%i|%T|%S|%r|%o"], patience_s, limit_s)
        if foreign := _listed(
            {*others} - {os.getuid()}
        ):  # without their words, which could have line breaks and be jobs
            printed += run_slurm([*asked, "-u", foreign, "-o", "%i|%T|%S|%r|"], patience_s, limit_s)
    except SubmitError as error:
        raise SubmitError(f"{error}; the state of the jobs is unknown") from None
    jobs = {}
    for line in printed.splitlines():
        if found := _QUEUED.fullmatch(line):  # the path of a script may have line breaks
            job, state, start, reason, script = found.groups()
            reason, start = ("" if text in ("None", "N/A") else text for text in (reason, start))
            jobs[job] = JobState(state, reason, start, script)
    return jobs


def jobs_of_runs(users: Iterable[int]) -> list[tuple[str, str]]:
    """Return user and state of each job of a run that these users have in the queue, as far as Slurm shows it; none where it does not answer."""
    command = ["squeue", "-h", "-a", "-r", "-u", _listed({os.getuid(), *users}), "-o", "%u|%T|%o"]
    try:
        lines = run_slurm(command, 0.0, _GLANCE_S).splitlines()
    except SubmitError:
        return []
    parts = [line.split("|", 2) for line in lines if line.count("|") > 1]  # the path of a script may have line breaks
    return [(user, state) for user, state, script in parts if "/.slurm/" in script]


def _listed(users: Collection[int]) -> str:
    """Return the ids of those that have an account, as squeue takes them: it complains of others."""
    return ",".join(str(user) for user in sorted(users) if user == os.getuid() or _has_account(user))


def _has_account(user: int) -> bool:
    try:
        pwd.getpwuid(user)
    except KeyError:
        return False
    return True


def find_job(job: str, jobs: Mapping[str, JobState]) -> JobState:
    """Return the state of a job among those of `queue`; GONE if it is not there.

    An array that was cancelled before its elements began is one job to Slurm, without their numbers.
    """
    whole = jobs.get(job.partition("_")[0], GONE)
    return jobs.get(job) or (whole if not whole.active else GONE)


def accounting(jobs: Iterable[str]) -> dict[str, JobState]:
    """Return sacct's states of jobs that the queue has forgotten; empty where there is no accounting."""
    wanted = sorted(set(jobs))
    if not wanted:
        return {}
    command = ["sacct", "-n", "-X", "-P", "-o", "JobID,State", "-j", ",".join(wanted)]
    try:
        lines = run_slurm(command, 0.0, _ACCOUNTING_S).splitlines()
    except SubmitError:  # a cluster need not have accounting
        return {}
    found = (line.partition("|") for line in lines)
    return {job: JobState(state.split()[0]) for job, _, state in found if state}


def local_state(job: str) -> JobState:
    """Return whether the local executor's process still runs."""
    try:
        command = Path(f"/proc/{job}/cmdline").read_bytes()
    except OSError:
        return GONE
    return JobState("RUNNING") if b"submitit" in command else GONE


def cancel_slurm(job: str) -> None:
    """Cancel a Slurm job. Raises SubmitError where scancel refuses, or the record of a run names no job: scancel would take `-u NAME` for its option."""
    if not _JOB.fullmatch(job):
        raise SubmitError(f"expected the number of a job to cancel, found {job!r:.80}")
    run_slurm(["scancel", job], PATIENCE_S)
