"""Finds runs by name, with their states."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from hpcrl.errors import RunError, SubmitError
from hpcrl.launch.manage.adopt_jobs import adopt
from hpcrl.launch.manage.state import Requests, RunState, is_held, state_of
from hpcrl.launch.manage.users import is_folder, owner_of, user_name
from hpcrl.launch.requeue.requests import requests_of
from hpcrl.launch.scheduler import GONE, PATIENCE_S, JobState, accounting, find_job, local_state, queue
from hpcrl.rundir.commit import read_json
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import read_attempts, read_outcome
from hpcrl.types import LARGEST

_MOST_LISTED = 8
_AT_ONCE = 16
_Read = TypeVar("_Read")
_TEXTS = ("executor", "host", "job_id")


def all_runs(root: Path) -> list[Run]:
    """Return every run under `root`, by project and name."""
    root = root.absolute()
    runs = [Run(root / of / name) for of in _folders(root) for name in _folders(root / of) if name[0] != "."]
    there = _of_each(lambda run: os.path.isfile(run.config), runs)
    return [run for run in runs if there[run]]


def unreadable(root: Path) -> list[Path]:
    """Return the directories under `root` that this user may not read, as those of other people."""
    root = root.absolute()
    projects = [root / name for name in _folders(root)]
    runs = [project / name for project in projects for name in _folders(project) if name[0] != "."]
    return [path for path in (*projects, *runs) if not os.access(path, os.R_OK | os.X_OK, effective_ids=True)]


def _folders(path: Path) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return sorted(entry.name for entry in entries if is_folder(entry))
    except OSError:
        return []


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


def find_runs(name: str, root: Path) -> list[Run]:
    """Return the run of this name, or the runs of the sweep that was submitted under it."""
    sweep = []
    for run in all_runs(root):
        submission = Path(os.path.realpath(run.slurm)).name
        if name in (submission, f"{run.project}/{submission}"):
            sweep.append(run)
    if len({run.project for run in sweep}) == 1:
        # 10 after 9
        return sorted(sweep, key=lambda run: [part.zfill(9) for part in re.split(r"(\d+)", run.name)])
    return [find_run(name, root)]


def _listed(runs: Sequence[Run]) -> str:
    shown = [f"{run.project}/{run.name}" for run in runs[:_MOST_LISTED]]
    return ", ".join([*shown, f"and {len(runs) - len(shown)} more"] if len(runs) > len(shown) else shown)


def states_of(runs: Sequence[Run]) -> list[RunState]:
    """Return the state of each run, asking the scheduler once for all of them."""
    states = _states(runs, PATIENCE_S)
    for state in states:
        if not state.job.known:
            raise (RunError if state.submission.get("executor") == "local" else SubmitError)(state.job.reason)
    return states


def known_states(runs: Sequence[Run], *, listed: bool = False) -> list[RunState]:
    """Return the state of each run as far as it is known now: without an answer of the scheduler, by its files.

    Args:
        listed: as of `state_of`.
    """
    return _states(runs, 0.0, listed)


def _states(runs: Sequence[Run], patience_s: float, listed: bool = False) -> list[RunState]:
    records, owners = _of_each(_submission, runs), _of_each(lambda run: owner_of(run.path), runs)
    submissions = {run: record or {} for run, record in records.items()}
    final = _of_each(_is_final, [run for run in runs if submissions[run].get("executor") != "local"])
    foreign = {run: uid for run, uid in owners.items() if uid not in (None, os.geteuid())}
    jobs, requests, queued, failure, here = {}, dict[Run, Requests](), {}, "", socket.gethostname()
    if final:
        try:
            queued = queue(patience_s, foreign.values())
        except SubmitError as error:
            failure = " ".join(str(error).split())
    own = {run: submission for run, submission in submissions.items() if run not in foreign}
    found = adopt(own, queued)
    submissions |= own
    for run, submission in submissions.items():
        if submission.get("executor") == "local":
            jobs[run] = _local(submission, here)
        elif not submission and records[run] is None:
            jobs[run] = JobState("UNKNOWN", _unrecorded(run))
        elif failure:
            jobs[run] = GONE if final[run] else JobState("UNKNOWN", failure)
        else:
            requests[run] = {name: (job, find_job(job, queued)) for name, job in requests_of(submission).items()}
            number, jobs[run] = _run_itself(run, requests[run])
            if number:
                submission["job_id"] = number
            if run in foreign and jobs[run] is GONE and os.geteuid() and not final[run]:
                jobs[run] = JobState("UNKNOWN", f"Slurm shows you no such job of {user_name(foreign[run])}")
    forgotten = {
        run: submission["job_id"]
        for run, submission in submissions.items()
        if submission.get("executor") == "slurm" and jobs[run] is GONE and not final[run]
    }
    accounted = accounting(forgotten.values())
    jobs |= {run: accounted.get(job, GONE) for run, job in forgotten.items()}
    states = _of_each(
        lambda run: state_of(run, submissions[run], jobs[run], run in found, requests.get(run), listed=listed), runs
    ).values()
    return [
        replace(state, damaged=True) if records[state.run] is None and not state.found else state for state in states
    ]


def _run_itself(run: Run, requests: Requests) -> tuple[str, JobState]:
    """Return the job that is the run, of those that were submitted for it: what runs, else of those that wait, what is not held, and has run last."""
    last = None
    if len(requests) > 1:
        with suppress(RunError, OSError):  # damaged, which the state tells
            last = next((attempt.job_id for attempt in reversed(read_attempts(run))), None)

    def rank(job: tuple[str, JobState]) -> tuple[bool, bool, bool, bool]:
        name, state = job
        return state.active and not state.waiting, state.active, not is_held(state), name == last

    return max(requests.values(), key=rank, default=("", GONE))


def _of_each(read: Callable[[Run], _Read], runs: Sequence[Run]) -> dict[Run, _Read]:
    """Return what is read of each run; a shared filesystem answers several questions in the time of one."""
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        return dict(zip(runs, threads.map(read, runs), strict=True))


def _submission(run: Run) -> dict[str, Any] | None:
    """Return the record of a run's last job; {} where there is none, None where it is damaged."""
    try:
        record = read_json(run.submission)
    except (ValueError, OSError):
        return None
    if record is None:
        return {}
    if not isinstance(record, dict) or not all(isinstance(record.get(name), str) for name in _TEXTS):
        return None
    requests = record.get("requests", {})
    if not isinstance(requests, dict) or not all(isinstance(job, str) for job in requests.values()):
        return None
    overrides = record.setdefault("overrides", [])
    listed = isinstance(overrides, list) and all(isinstance(override, str) for override in overrides)
    submitted = record.setdefault("submitted", 0.0)
    return record if listed and type(submitted) in (int, float) and abs(submitted) <= LARGEST else None


def _unrecorded(run: Run) -> str:
    gone = json.dumps({"executor": "slurm", "host": "", "job_id": "0"})
    return (
        f"{run.submission} is damaged, so its job is not known. Restore it from a backup; or, if squeue shows no job of {run.name}, write down "
        f"that there is none: echo '{gone}' > {shlex.quote(str(run.submission))} (\"local\" for a run with --local)"
    )


def _is_final(run: Run) -> bool:
    try:
        outcome = read_outcome(run)
    except (RunError, OSError):  # damaged, which its state tells
        return False
    return outcome is not None and outcome.final


def _local(submission: dict[str, Any], here: str) -> JobState:
    host = submission["host"]
    if host != here:
        return JobState("UNKNOWN", f"this run was started with --local on {host}; ask there")
    return local_state(submission["job_id"])
