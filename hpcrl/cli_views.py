"""The commands that look at runs: `hpcrl status`, `hpcrl tensorboard`."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcrl.launch.state import RunState

_NAMES = "name, project/name or path of a run, or the name of a sweep"


def add_views(commands: argparse._SubParsersAction) -> None:
    """Add these commands to those of hpcrl."""

    def command(name: str, text: str) -> argparse.ArgumentParser:
        parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        parser.add_argument("--root", type=Path, help="where runs are looked for (default: $HPCRL_ROOT, else ./runs)")
        parser.set_defaults(action=globals()[f"_{name}"])
        return parser

    status = command("status", "say in what state runs are, why, and how far")
    status.add_argument("runs", nargs="*", metavar="RUN", help=f"{_NAMES} (default: all runs)")
    status.add_argument("--json", action="store_true", help="a JSON list, one object per run")
    tensorboard = command("tensorboard", "print the command that shows the curves of runs")
    tensorboard.add_argument("runs", nargs="+", metavar="RUN", help=_NAMES)
    tensorboard.add_argument("--rebuild", action="store_true", help="write RUN/tensorboard anew from RUN/metrics")
    tensorboard.add_argument("--port", type=int, default=6006, help="of the server (6006)")


def _status(arguments: argparse.Namespace) -> int:
    from json import dumps

    from hpcrl.launch.registry import all_runs, default_root, find_runs, known_states

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
    print(f"  checkpoint  {progress.checkpoint or 'none'}")
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


def _tensorboard(arguments: argparse.Namespace) -> int:
    from shlex import join
    from socket import gethostname

    from hpcrl.launch.registry import default_root, find_runs
    from hpcrl.observe.tensorboard import rebuild

    root = arguments.root or default_root()
    runs = list(dict.fromkeys(run for name in arguments.runs for run in find_runs(name, root)))
    for run in runs:
        if arguments.rebuild or not run.tensorboard.is_dir():
            rebuild(run)
    if len(runs) == 1:
        logs = ["--logdir", str(runs[0].tensorboard)]
    else:
        alike = len({run.name for run in runs}) < len(runs)
        named = (f"{f'{run.project}/' if alike else ''}{run.name}:{run.tensorboard}" for run in runs)
        logs = ["--logdir_spec", ",".join(named)]
    print(join([_program(), *logs, "--host", "127.0.0.1", "--port", str(arguments.port)]))
    print(f"from your own machine: ssh -L {arguments.port}:127.0.0.1:{arguments.port} {gethostname()}")
    return 0


def _program() -> str:
    """Return the name of TensorBoard where the shell would find it, else its path beside this Python."""
    from shutil import which
    from sys import executable

    return "tensorboard" if which("tensorboard") else str(Path(executable).parent / "tensorboard")
