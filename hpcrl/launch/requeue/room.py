"""Asks Slurm whether a job of the run's kind would start at once on some nodes, and whether others wait for the nodes of the run."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from datetime import datetime
from tempfile import TemporaryDirectory

from hpcrl.errors import SubmitError
from hpcrl.launch.scheduler import not_here, run_slurm

_AT_ONCE_S = 60.0
_ANSWER_S = 20.0
_EXPECTED = re.compile(r"to start at (\S+) using .* in partition (\S+)")
_WAITS_FOR_NODES = ("Resources", "Priority")
_ARRAY_LIMIT = "JobArrayTaskLimit"
_OWN_LIMIT = re.compile(r"(?!Partition)(?!.*PerJob)\w*Limit")  # those two hold a job whatever else runs


def starts_at_once(script: str, nodes: int) -> str | None:
    """Return the partition in which Slurm would start a job of this batch script on so many idle nodes now; None: it would not.

    Raises:
        SubmitError: sbatch is not here, or gives no answer.
    """
    # as from a login node: variables of this job would be options of the other one
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
    environment |= {name: os.environ[name] for name in ("SLURM_CONF",) if name in os.environ}
    command = ["sbatch", "--test-only", f"--nodes={nodes}", script]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, timeout=_ANSWER_S, env=environment
        )
    except FileNotFoundError:
        raise not_here("sbatch") from None
    except subprocess.TimeoutExpired:
        raise SubmitError(f"sbatch --test-only: no answer in {_ANSWER_S:.0f} s") from None
    return expected_at_once(done.stdout + done.stderr, time.time()) if done.returncode == 0 else None


def expected_at_once(answer: str, now: float) -> str | None:
    """Return the partition that an answer of `sbatch --test-only` names, where the job would start now and take no node from others.

    Args:
        now: Unix time.
    """
    found = _EXPECTED.search(answer)
    if found is None or "Preempts:" in answer:
        return None
    try:
        start = datetime.fromisoformat(found[1]).timestamp()  # local time, as of this process
    except ValueError:
        return None
    return found[2] if start - now <= _AT_ONCE_S else None


def others_wait(hosts: Sequence[str], own: Collection[str]) -> bool:
    """Return whether jobs wait for nodes in the partitions of these hosts, as far as Slurm shows them: they could take what the run gives back.

    So could this user's jobs that wait for a limit of the user, and elements of the run's sweep that wait for slurm.array_parallelism.

    Args:
        own: jobs of the run, which do not count.

    Raises:
        SubmitError: Slurm does not answer.
    """
    partitions = sorted(set(run_slurm(["sinfo", "-h", "-n", ",".join(hosts), "-o", "%R"], 0.0, _ANSWER_S).split()))
    command = ["squeue", "-h", "-a", "-r", "-t", "PENDING", "-p", ",".join(partitions), "-o", "%i|%U|%r"]
    jobs = (line.split("|", 2) for line in run_slurm(command, 0.0, _ANSWER_S).splitlines())
    arrays = {_array(job) for job in own}
    return any(
        job not in own and _could_start(reason, user == str(os.getuid()), _array(job) in arrays)
        for job, user, reason in jobs
    )


def _array(job: str) -> str:
    return job.partition("_")[0]


def _could_start(reason: str, own_user: bool, own_array: bool) -> bool:
    """Return whether a job that waits for this reason could start once the run gives its nodes back."""
    if reason == _ARRAY_LIMIT:
        return own_array
    return reason in _WAITS_FOR_NODES or (own_user and _OWN_LIMIT.fullmatch(reason) is not None)


def nodes_of_job(job: str) -> int:
    """Return the nodes that a running job has, without those that Slurm has taken out of it. Raises SubmitError where Slurm does not tell them."""
    count = run_slurm(["squeue", "-h", "-r", "-j", job, "-o", "%D"], 0.0, _ANSWER_S).strip()
    if not count.isdecimal():
        raise SubmitError(f"squeue -j {job}: expected the number of its nodes, found {count!r:.80}")
    return int(count)


def keep_nodes(job: str, hosts: Sequence[str]) -> bool:
    """Return all other nodes of a running job to Slurm, which ends its tasks there; return False, with the reason printed, where Slurm refuses.

    A requeue asks for as many nodes as before.
    """
    command = ["scontrol", "update", f"JobId={job}", f"NodeList={','.join(hosts)}"]
    try:
        with TemporaryDirectory() as folder:  # scontrol leaves scripts in its working directory
            run_slurm(command, 0.0, _ANSWER_S, folder=folder)
    except (SubmitError, OSError) as error:  # nodes that are held for nothing are not worth an attempt
        with suppress(SubmitError):
            if nodes_of_job(job) == len(hosts):  # Slurm took them, and its answer came too late
                return True
        print(f"the nodes that are not used stay in the job: {error}", flush=True)
        return False
    return True


def seconds_until_down() -> float:
    """Return the seconds after which Slurm counts a silent node as down. Raises SubmitError where Slurm does not tell them."""
    found = re.search(r"^SlurmdTimeout\s*= (\d+) sec", run_slurm(["scontrol", "show", "config"], 0.0, _ANSWER_S), re.M)
    if found is None:
        raise SubmitError("scontrol show config: expected SlurmdTimeout")
    return float(found[1])


def seconds_left(job: str) -> float:
    """Return the seconds until the time limit of a running job. Raises SubmitError where Slurm does not tell them."""
    end = run_slurm(["squeue", "-h", "-r", "-j", job, "-o", "%e"], 0.0, _ANSWER_S).strip()
    try:
        return datetime.fromisoformat(end).timestamp() - time.time()
    except ValueError:
        raise SubmitError(f"squeue -j {job}: expected the end of the job, found {end!r:.80}") from None
