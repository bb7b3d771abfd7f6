"""`hpcrl status`: in what state runs are, why, and how far."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from hpcrl.cli._common import RUNS, add_root

if TYPE_CHECKING:
    from hpcrl.launch.manage.state import RunState


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_root(parser)
    parser.add_argument("runs", nargs="*", metavar="RUN", help=f"{RUNS} (default: all runs)")
    parser.add_argument("--json", action="store_true", help="a JSON list, one object per run")
    parser.set_defaults(action=_status)


def _status(arguments: argparse.Namespace) -> int:
    from json import dumps

    from hpcrl.launch.manage.registry import all_runs, find_runs, known_states
    from hpcrl.rundir.layout import default_root

    root = arguments.root or default_root()
    named = dict.fromkeys(run for name in arguments.runs for run in find_runs(name, root))
    states = known_states(list(named) or all_runs(root))
    if arguments.json:
        print(dumps([_as_json(state) for state in states], indent=2))
    elif len(named) == 1:
        _show(states[0])
    elif not states:
        print(f"no runs under {root.absolute()}")
    else:
        for state in states:
            name = f"{state.run.project}/{state.run.name}"
            print(f"{name:40} {state.kind:12} job {state.submission.get('job_id', '-'):10} {state.detail}")
    return 0


def _show(state: RunState) -> None:
    progress, submission = state.progress, state.submission
    print(f"{state.run.name}: {state.kind}" + (f": {state.detail}" if state.detail else ""))
    if state.advice:
        print(f"  next        {state.advice}")
    print(f"  directory   {state.run.path}")
    found = ", found in the queue: its submission was cut short" if state.found else ""
    print(
        f"  job         {submission.get('job_id', '-')} ({submission.get('executor', '-')}, {state.job.name.lower()}{found})"
    )
    print(f"  attempt     {state.attempt}")
    print(f"  checkpoint  {progress.checkpoint or 'none'}")
    if submission.get("overrides"):
        print(f"  overrides   {' '.join(submission['overrides'])}")
    for status in state.statuses:
        age = max(0.0, time.time() - status.renewed)
        print(f"  {status.process:11} {status.state} ({status.host}, {age:.0f} s ago)")


def _as_json(state: RunState) -> dict[str, Any]:
    from dataclasses import asdict

    job = state.job
    return {
        "run": state.run.name,
        "project": state.run.project,
        "path": str(state.run.path),
        "state": state.kind,
        "detail": state.detail,
        "advice": state.advice,
        "over": state.over,
        "executor": state.submission.get("executor"),
        "job": {"id": state.submission.get("job_id"), "state": job.name, "reason": job.reason, "start": job.start},
        "overrides": state.submission.get("overrides", []),
        "attempt": state.attempt,
        "outcome": asdict(state.outcome) if state.outcome else None,
        "progress": {**asdict(state.progress), "eta": state.progress.eta},
        "processes": [asdict(status) for status in state.statuses],
    }
