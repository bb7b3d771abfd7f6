"""The commands that look at runs: `hpcrl status`, `hpcrl tensorboard`."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcrl.launch.state import RunState


def add_views(commands: argparse._SubParsersAction) -> None:
    """Add these commands to those of hpcrl."""

    def command(name: str, text: str) -> argparse.ArgumentParser:
        parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        parser.add_argument("--root", type=Path, help="where runs are looked for (default: $HPCRL_ROOT, else ./runs)")
        parser.set_defaults(action=globals()[f"_{name}"])
        return parser

    status = command("status", "say in what state runs are, why, and how far")
    status.add_argument("runs", nargs="*", metavar="RUN", help="name, project/name or path (default: all runs)")
    status.add_argument("--json", action="store_true", help="a JSON list, one object per run")


def _status(arguments: argparse.Namespace) -> int:
    from json import dumps

    from hpcrl.launch.registry import all_runs, default_root, find_run, known_states

    root = arguments.root or default_root()
    states = known_states([find_run(name, root) for name in arguments.runs] or all_runs(root))
    if arguments.json:
        print(dumps([_as_json(state) for state in states], indent=2))
    elif arguments.runs:
        for state in states:
            _show(state)
    elif not states:
        print(f"no runs under {root.absolute()}")
    else:
        for state in states:
            name = f"{state.run.project}/{state.run.name}"
            print(f"{name:40} {state.word:12} job {state.submission.get('job_id', '-'):10} {state.detail}")
    return 0


def _show(state: RunState) -> None:
    progress, submission = state.progress, state.submission
    print(f"{state.run.name}: {state.word}" + (f": {state.detail}" if state.detail else ""))
    if state.advice:
        print(f"  next        {state.advice}")
    print(f"  directory   {state.run.path}")
    found = ", found in the queue: its submission was cut short" if state.found else ""
    print(
        f"  job         {submission.get('job_id', '-')} ({submission.get('executor', '-')}, {state.job.name.lower()}{found})"
    )
    print(f"  attempt     {state.attempt}")
    print(f"  checkpoint  {'none' if progress.checkpoint is None else f'step {progress.checkpoint}'}")
    if submission.get("overrides"):
        print(f"  overrides   {' '.join(submission['overrides'])}")
    for lease in state.leases:
        age = max(0.0, time.time() - lease.renewed)
        print(f"  {lease.process:11} {lease.state} ({lease.host}, {age:.0f} s ago)")


def _as_json(state: RunState) -> dict[str, Any]:
    from dataclasses import asdict

    job = state.job
    return {
        "run": state.run.name,
        "project": state.run.project,
        "path": str(state.run.path),
        "state": state.word,
        "detail": state.detail,
        "advice": state.advice,
        "over": state.over,
        "executor": state.submission.get("executor"),
        "job": {"id": state.submission.get("job_id"), "state": job.name, "reason": job.reason, "start": job.start},
        "overrides": state.submission.get("overrides", []),
        "attempt": state.attempt,
        "outcome": asdict(state.outcome) if state.outcome else None,
        "progress": {**asdict(state.progress), "eta": state.progress.eta},
        "processes": [asdict(lease) for lease in state.leases],
    }
