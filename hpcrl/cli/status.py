"""`hpcrl status`: in what state runs are, why, and how far."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from hpcrl.cli._common import RUNS, add_root
from hpcrl.text import one_line

if TYPE_CHECKING:
    from hpcrl.launch.manage.state import RunState
    from hpcrl.observe.summary import Headline
    from hpcrl.rundir.layout import Run

Achieved = TypeVar("Achieved", bound="Headline")
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
    states = known_states(list(named) or all_runs(root), listed=not arguments.json and len(named) != 1)
    if arguments.json:
        print(dumps([_as_json(state) for state in states], indent=2))
    elif len(named) == 1:
        _show(states[0])
    elif not states:
        print(f"no runs under {root.absolute()}")
    else:
        from hpcrl.observe.summary import headline

        print("\n".join(_line(state, _achieved(state, headline)) for state in states))
    return 0


def _line(state: RunState, achieved: Headline | None) -> str:
    name, job = f"{state.run.project}/{state.run.name}", state.submission.get("job_id", "-")
    return one_line(f"{name:40} {state.kind:12} job {job:10} {_detail(state, achieved)}")


def _achieved(state: RunState, read: Callable[[Run], Achieved]) -> Achieved | None:
    """Return what a run has achieved; None where its files are damaged, or may be."""
    from hpcrl.errors import RunError

    with suppress(RunError, OSError):  # the state names it
        return read(state.run) if state.kind != "unknown" else None
    return None


def _detail(state: RunState, achieved: Headline | None) -> str:
    said = str(achieved or "")
    if state.kind == "done":
        return said or state.detail
    return " · ".join(part for part in (state.detail, said) if part)


def _show(state: RunState) -> None:
    for line in _lines(state):
        print(one_line(line))


def _lines(state: RunState) -> Iterator[str]:
    from hpcrl.observe.summary import summarise
    from hpcrl.observe.view import summary_rows
    from hpcrl.upload.state import upload_states

    progress, submission = state.progress, state.submission
    summary = _achieved(state, summarise)
    detail = _detail(state, summary) if state.kind == "done" else state.detail
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
    for name, value in summary_rows(summary) if summary and summary.steps else ():
        if name in _ACHIEVED:
            yield f"  {name:11} {value}"
    for store, upload in upload_states(state.run).items():
        for line in upload.lines():
            yield f"  {f'upload {store}':11} {line}"
    for status in state.statuses if not state.over else ():
        age = max(0.0, time.time() - status.renewed)
        yield f"  {status.process:11} {status.state} ({status.host}, {age:.0f} s ago)"


def _as_json(state: RunState) -> dict[str, Any]:
    from dataclasses import asdict

    from hpcrl.observe.summary import summarise
    from hpcrl.upload.state import upload_states

    job, summary = state.job, _achieved(state, summarise)
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
        "uploads": {store: asdict(upload) for store, upload in upload_states(state.run).items()},
        "processes": [asdict(status) for status in state.statuses],
    }
