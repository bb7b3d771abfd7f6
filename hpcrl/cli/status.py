"""`hpcrl status`: in what state runs are, why, and how far."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from hpcrl.cli._common import RUNS, add_root
from hpcrl.text import one_line

if TYPE_CHECKING:
    from hpcrl.launch.manage.state import RunState
    from hpcrl.observe.summary import Summary

_ACHIEVED = ("eval score", "reward", "steps", "time")


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
            print(one_line(f"{name:40} {state.kind:12} job {state.submission.get('job_id', '-'):10} {_detail(state)}"))
    return 0


def _summary(state: RunState) -> Summary | None:
    """Return what a run has achieved; None where its files are damaged, or may be."""
    from hpcrl.errors import RunError
    from hpcrl.observe.summary import summarise

    with suppress(RunError, OSError):  # the state names it
        return summarise(state.run) if state.kind != "unknown" else None
    return None


def _detail(state: RunState) -> str:
    from hpcrl.observe.summary import headline

    summary = _summary(state)
    achieved = headline(summary) if summary else ""
    if state.kind == "done":
        return achieved or state.detail
    return " · ".join(part for part in (state.detail, achieved) if part)


def _show(state: RunState) -> None:
    for line in _lines(state):
        print(one_line(line))


def _lines(state: RunState) -> Iterator[str]:
    from hpcrl.observe.view import summary_rows

    progress, submission = state.progress, state.submission
    detail = _detail(state) if state.kind == "done" else state.detail
    yield f"{state.run.name}: {state.kind}" + (f": {detail}" if detail else "")
    if state.advice:
        yield f"  next        {state.advice}"
    yield f"  directory   {state.run.path}"
    found = ", found in the queue: its submission was cut short" if state.found else ""
    yield f"  job         {submission.get('job_id', '-')} ({submission.get('executor', '-')}, {state.job.name.lower()}{found})"
    yield f"  attempt     {state.attempt}"
    yield f"  checkpoint  {progress.checkpoint or 'none'}"
    if submission.get("overrides"):
        yield f"  overrides   {' '.join(submission['overrides'])}"
    summary = _summary(state)
    for name, value in summary_rows(summary) if summary and summary.steps else ():
        if name in _ACHIEVED:
            yield f"  {name:11} {value}"
    for status in state.statuses if not state.over else ():
        age = max(0.0, time.time() - status.renewed)
        yield f"  {status.process:11} {status.state} ({status.host}, {age:.0f} s ago)"


def _as_json(state: RunState) -> dict[str, Any]:
    from dataclasses import asdict

    job, summary = state.job, _summary(state)
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
        "summary": {name: value for name, value in asdict(summary).items() if name != "outcome"} if summary else None,
        "processes": [asdict(status) for status in state.statuses],
    }
