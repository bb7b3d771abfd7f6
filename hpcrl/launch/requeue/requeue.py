"""Requeues the caller's own job at the end of its batch script."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from hpcrl.launch.scheduler import is_away

BATCH_SHELL = "HPCRL_BATCH_SHELL"
"""Variable with the number of the process that runs the batch script."""
LEAST_NODES = "HPCRL_LEAST_NODES"
"""Variable with the nodes of the smallest layout; set where the batch script can start another attempt in the same allocation."""
ATTEMPTS_HERE = "HPCRL_ATTEMPTS_HERE"
"""Variable with the attempts of this start of the job that ended before, in the same allocation."""
HERE = 76
"""Exit status of the end of a batch script that starts another attempt on the nodes that are left."""
NOW, SOON, LATER = "now", "now+2", "now+2minutes"
"""When an interrupted run may start again. slurmd revokes by the second: a job that starts in the second of its requeue fails, its credential revoked.
LATER: where another one goes first."""
_RETRY_S = 2.0
_PATIENCE_S = 150.0  # slurmctld may be restarting
_KILLED_WITHIN_S = 90.0
_UPDATES_S = 20.0
_NONE = ("", "(null)")
_SIGKILL = ("9", "0:9")
"""Exit codes of a script that got SIGKILL, as squeue prints them."""
# which of them says that a batch script did not end by itself differs between versions of Slurm, and between what they print
_KILLED = ("JobLaunchFailure", "NonZeroExitCode", "RaisedSignal")
_ANSWER_S = 10.0


def job_name() -> str:
    """Return the id by which Slurm requeues this element alone: the raw job id may be that of the whole array."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ["SLURM_JOB_ID"]


def start_name() -> str:
    """Return the key of this start of the job, as `Attempt.job`: 12_0.1 after a requeue, 12_0.1+1 where a second attempt follows there."""
    again = os.environ.get(ATTEMPTS_HERE) or "0"
    return f"{job_name()}.{os.environ.get('SLURM_RESTART_COUNT') or '0'}" + (f"+{again}" if again != "0" else "")


def claimed_start(start: str) -> str:
    """Return the key by which a start claims its run, the same for all its attempts."""
    return start.partition("+")[0]


def set_dependency(jobs: Sequence[str], after: str | None, start: str | None = None) -> None:
    """Let jobs that wait in the queue wait for the end of the job `after` too, or with None for none; one that runs is left as it is.

    Args:
        start: when they may start, as of `requeue_this_job`; None: that stays.
    """
    for job in jobs:
        words = [f"JobId={job}", f"Dependency=afterany:{after}" if after else "Dependency="]
        words += [f"StartTime={start}"] if start else []
        try:
            done = _run("scontrol", "update", *words, limit_s=_ANSWER_S)
            print(f"scontrol update {' '.join(words)}: {done.stderr.strip() or 'done'}", flush=True)
        except subprocess.TimeoutExpired as error:
            print(f"scontrol update {' '.join(words)}: {error}", flush=True)


def outlive_the_job() -> None:
    """Ignore what ends a process: Slurm ends the caller with the job that it asks Slurm to requeue, and it needs a moment longer."""
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _scontrol(*words: str) -> bool:
    """Return whether scontrol did it; it is tried again while slurmctld does not answer."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        done = _run("scontrol", *words)
        output = done.stderr.strip()
        print(f"scontrol {' '.join(words)}: {output or 'done'}", flush=True)
        if done.returncode == 0 or not is_away(output) or time.monotonic() > deadline:
            return done.returncode == 0
        time.sleep(_RETRY_S)


def requeue_this_job(
    *,
    start: str | None,
    exclude: Sequence[str],
    after: str | None = None,
    freed: Mapping[str, str | None] = MappingProxyType({}),
) -> None:
    """Requeue the job that the caller is part of, and wait to be ended with it.

    Args:
        start: when it may start again, as for sbatch --begin, if the site lets its users decide; None: after Slurm's two minutes.
        exclude: hosts that it should not get again, as far as enough others are left.
        after: a job whose end it waits for.
        freed: jobs that wait for this one, and need not any more, with when they may start; None: as before.
    """
    job, parent = job_name(), os.getppid()
    # a refusal most likely says that Slurm has requeued it already, because it preempted it
    _scontrol("requeue", job)
    deadline = time.monotonic() + _KILLED_WITHIN_S
    for other, when in freed.items():
        set_dependency([other], after=None, start=when)
    updates = [[f"StartTime={start}"]] if start else []
    updates += [[f"Dependency=afterany:{after}"]] if after else []
    if exclude and (avoided := _avoided(job, exclude)):
        updates.append([f"ExcNodeList={avoided}"])
    while time.monotonic() < deadline:  # the end of this loop is the end of the job that Slurm requeues
        updates = [update for update in updates if not _scontrol("update", f"JobId={job}", *update)]
        if os.getppid() != parent:  # that end has come for the batch script; Slurm does not look for what it leaves
            deadline = min(deadline, time.monotonic() + (_UPDATES_S if updates else 0.0))
        time.sleep(min(_RETRY_S, max(0.0, deadline - time.monotonic())))


def requeue_if_its_script_was_killed() -> None:
    """Requeue the job that the caller is part of, where Slurm ends it because its batch script was killed.

    To be asked by an agent that Slurm tells to end, while there is time. Who requeues jobs is that script, and Slurm takes its end for the
    job's. What the policy says then counts at the end of the next attempt; a run that is over finds nothing to do in it.
    """
    job = job_name()
    try:
        status, reason = _squeue(job, "-O", "exit_code:20,reason:80").split(maxsplit=1)
        if status in _SIGKILL and reason.startswith(_KILLED):
            done = _run("scontrol", "requeue", job, limit_s=_ANSWER_S)
            print(f"the batch script was killed; scontrol requeue {job}: {done.stderr.strip() or 'done'}", flush=True)
    except ValueError:
        print("whether the batch script was killed is not known: squeue does not show its job", flush=True)
    except subprocess.TimeoutExpired as error:
        print(f"whether the batch script was killed is not known: {error}", flush=True)


def _avoided(job: str, exclude: Sequence[str]) -> str:
    """Return `exclude` with the hosts that the job's user excludes; empty if too few are left.

    Empty, too, where the user wants certain hosts or features, of which it is not known how many hosts have them.
    """
    try:
        wanted, excluded, features = _squeue(job, "-o", "%n|%x|%f").strip().split("|", 2)
    except (ValueError, subprocess.TimeoutExpired):
        return ""
    if wanted not in _NONE or features not in _NONE:
        return ""
    own = _shown("hostnames", excluded) if excluded not in _NONE else []
    if not own and excluded not in _NONE:  # what is set would take its place
        return ""
    avoided = {*own, *exclude}
    return ",".join(sorted(avoided)) if _others_suffice(avoided) else ""


def _run(*command: str, limit_s: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program of Slurm's; where it is missing, as in a container that lacks them, it fails as in a shell."""
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, timeout=limit_s)
    except FileNotFoundError:
        remedy = "not on PATH here; mount Slurm's programs into the container, or set slurm.container.host_python"
        return subprocess.CompletedProcess(command, 127, "", f"{command[0]}: {remedy}\n")


def _squeue(job: str, *columns: str) -> str:
    """Return columns of a job. `scontrol show job` also prints its name and comment, which could be any other field."""
    return _run("squeue", "-h", "-r", "-t", "all", "-j", job, *columns, limit_s=_ANSWER_S).stdout


def _shown(*what: str) -> list[str]:
    done = _run("scontrol", "show", *what)
    return done.stdout.split() if done.returncode == 0 else []


def _others_suffice(exclude: Collection[str]) -> bool:
    partition, wanted = os.environ.get("SLURM_JOB_PARTITION", ""), int(os.environ.get("SLURM_JOB_NUM_NODES") or "1")
    asked = [
        "sinfo",
        "-h",
        "-N",
        "-o",
        "%N",
        "-t",
        "idle,alloc,mix,comp,resv",
        *(["-p", partition] if partition else []),
    ]
    done = _run(*asked)
    return len(set(done.stdout.split()) - set(exclude)) >= wanted
