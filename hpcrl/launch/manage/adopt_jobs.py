"""Finds jobs in the queue without a record in a run directory: their `hpcrl submit` died before it could write one."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcrl.launch.requeue.requests import requests_of
from hpcrl.launch.scheduler import JobState, find_job
from hpcrl.rundir.commit import read_json, write_json
from hpcrl.rundir.layout import Run

_ELEMENTS = re.compile(r"-m hpcrl\.launch\.requeue\.epilogue (.+)")


def adopt(submissions: dict[Run, dict[str, Any]], queued: Mapping[str, JobState]) -> set[Run]:
    """Record the active jobs that run one of these runs, and are not the one that the run directory names.

    Args:
        submissions: what the run directories name; changed here.
        queued: jobs by id.

    Returns:
        The runs whose job was found so.
    """
    recorded = {job for submission in submissions.values() for job in requests_of(submission).values()}
    unknown = {id: job for id, job in queued.items() if job.active and id not in recorded and "/.slurm/" in job.script}
    if not unknown:
        return set()
    folders = {os.path.realpath(run.slurm) for run in submissions}
    found = dict[Run, list[str]]()
    for job_id, job in unknown.items():
        if os.path.realpath(Path(job.script).parent) not in folders:
            continue
        run = _run_of(job_id, Path(job.script))
        if run is None or run not in submissions:
            continue
        if any(find_job(own, queued).active for own in requests_of(submissions[run]).values()):
            continue
        found.setdefault(run, []).append(job_id)
    for run, jobs in found.items():
        submissions[run] = _record(run, submissions[run], jobs)
    return set(found)


def _run_of(job: str, script: Path) -> Run | None:
    try:
        match = _ELEMENTS.search(script.read_text())
        runs = read_json(Path(shlex.split(match[1])[0])) if match else None
    except (OSError, ValueError):  # not there any more, or damaged
        return None
    index = job.partition("_")[2]
    if not isinstance(runs, list) or not index.isdigit() or int(index) >= len(runs):
        return None
    return Run(Path(runs[int(index)])) if isinstance(runs[int(index)], str) else None


def _record(run: Run, before: Mapping[str, Any], jobs: Sequence[str]) -> dict[str, Any]:
    """Record the jobs of a run, several where it has several requests, unless another process is about to; return the record."""
    overrides = before.get("overrides", [])
    record = {
        "executor": "slurm", "host": socket.gethostname(), "job_id": jobs[0], "overrides": overrides, "submitted": time.time(),
        **({"requests": {f"job {job}": job for job in jobs}} if len(jobs) > 1 else {}),
    }  # fmt: skip
    if not before:
        try:
            descriptor = os.open(run.submission, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:  # another command records it now, or it is damaged
            return record
        with os.fdopen(descriptor, "w") as file:
            file.write(json.dumps(record))
        return record
    with run.submission.open("r+") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # `hpcrl resume` is at work and will record it, or the filesystem has no locks
            return record
        write_json(run.submission, record)
    return record
