"""`hpcrl status`: show the state and progress of runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hpcrl.cli._common import RUNS, add_root, follow
from hpcrl.text import one_line

if TYPE_CHECKING:
    from hpcrl.launch.manage.screen import RunView
    from hpcrl.launch.manage.state import RunState
    from hpcrl.observe.summary import Headline
    from hpcrl.rundir.alerts import Alert
    from hpcrl.rundir.layout import Run

_AT_ONCE = 16  # runs whose files are read at the same time

Achieved = TypeVar("Achieved", bound="Headline")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_root(parser)
    parser.add_argument("runs", nargs="*", metavar="RUN", help=f"{RUNS} (default: all runs)")
    parser.add_argument(
        "--size", action="store_true", help="the size of each run on disk too; reads the size of each file"
    )
    parser.add_argument(
        "--all-users",
        action="store_true",
        help="the runs of all users, with their owners; --root may be a pattern in quotes, such as '/scratch/*/runs'",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="a JSON list, one object per run")
    how.add_argument(
        "--follow", action="store_true", help="show those that go on until they are over, as `hpcrl follow` does"
    )
    parser.set_defaults(action=_status)


def _status(arguments: argparse.Namespace) -> int:
    from json import dumps

    from hpcrl.errors import ConfigError
    from hpcrl.launch.manage.registry import all_runs, find_runs, known_states, unreadable
    from hpcrl.rundir.layout import default_root

    root = arguments.root or default_root()
    if arguments.all_users:
        if arguments.runs or arguments.follow:
            raise ConfigError("--all-users lists runs: leave out RUN and --follow")
        return _all_users(root, arguments)
    named = dict.fromkeys(run for name in arguments.runs for run in find_runs(name, root))
    if arguments.follow and named:
        return follow(list(named))
    states = known_states(list(named) or all_runs(root), listed=not arguments.json and len(named) != 1)
    if arguments.follow and (going_on := [state.run for state in states if not state.over]):
        return follow(going_on)
    if arguments.json:
        print(dumps([_as_json(state, arguments.size, with_goodput=bool(named)) for state in states], indent=2))
    elif len(named) == 1:
        _show(states[0])
        if arguments.size:
            print(f"  {'disk':11} {_size(states[0].run)}")
    elif not states:
        foreign = unreadable(root)
        print(f"no runs under {root.absolute()}" + (f", but {len(foreign)} that you may not read" if foreign else ""))
    else:
        for line in _lines(states, arguments.size):
            print(line)
        if not named and (foreign := unreadable(root)):
            print(f"and {len(foreign)} that you may not read, such as {foreign[0]}")
    return 0


def _all_users(pattern: Path, arguments: argparse.Namespace) -> int:
    from json import dumps

    from hpcrl.launch.manage.registry import all_runs, known_states, unreadable
    from hpcrl.launch.manage.users import describe_unreadable, owner_of, roots_of, user_name

    roots, closed = roots_of(pattern)
    closed += [path for root in roots for path in unreadable(root)]
    states = known_states([run for root in roots for run in all_runs(root)], listed=not arguments.json)
    owners = {state.run: user_name(owner_of(state.run.path)) for state in states}
    states.sort(key=lambda state: owners[state.run])
    if arguments.json:
        print(dumps([_as_json(state, arguments.size) for state in states], indent=2))
    else:
        for state, line in zip(states, _lines(states, arguments.size), strict=True):
            print(f"{owners[state.run]:12} {line}")
    if not states:
        print(f"no runs under {pattern.absolute()} that you may read", file=sys.stderr)
    for line in describe_unreadable(closed):
        print(line, file=sys.stderr if arguments.json else sys.stdout)
    return 0


def _lines(states: Sequence[RunState], with_size: bool) -> list[str]:
    from concurrent.futures import ThreadPoolExecutor

    from hpcrl.observe.summary import headline

    def line(state: RunState) -> str:
        return _line(state, _achieved(state, headline)) + (f" · {_size(state.run)}" if with_size else "")

    with ThreadPoolExecutor(_AT_ONCE) as threads:
        return list(threads.map(line, states))


def _size(run: Run) -> str:
    """Return the size of a run, and its largest folders."""
    from hpcrl.launch.manage.remove import sizes_of
    from hpcrl.units import readable_size

    sizes = sizes_of(run)
    large = [f"{name or 'files'} {readable_size(size)}" for name, size in list(sizes.items())[:3]]
    return f"{readable_size(sum(sizes.values()))} ({', '.join(large)})"


def _line(state: RunState, achieved: Headline | None) -> str:
    name, job = f"{state.run.project}/{state.run.name}", state.submission.get("job_id", "-")
    alerts = [f" · ! {alert}" for alert in _alerts(state.run) if alert.cleared is None]
    return one_line(f"{name:40} {state.kind:12} job {job:10} {_detail(state, achieved)}{''.join(alerts[-1:])}")


def _alerts(run: Run) -> list[Alert]:
    from hpcrl.rundir.alerts import read_alerts

    with suppress(OSError):
        return read_alerts(run)
    return []


def _achieved(state: RunState, read: Callable[[Run], Achieved]) -> Achieved | None:
    from hpcrl.errors import RunError

    with suppress(RunError, OSError):  # the state names it
        return read(state.run) if state.kind != "unknown" else None
    return None


def _detail(state: RunState, achieved: Headline | None) -> str:
    summary = str(achieved or "")
    if state.kind == "done":
        return summary or state.detail
    return " · ".join(part for part in (state.detail, summary) if part)


def _show(state: RunState) -> None:
    from hpcrl.launch.manage.screen import details

    view = _view(state)
    print(one_line(f"{state.run.name}: {state.kind}" + (f": {view.detail}" if view.detail else "")))
    for label, text in details(view):
        print(one_line(f"  {label:11} {text}"))


def _view(state: RunState) -> RunView:
    from hpcrl.errors import RunError
    from hpcrl.launch.manage.follow import read_view
    from hpcrl.launch.manage.screen import RunView
    from hpcrl.observe.live_status import LiveStatusReader

    with suppress(RunError, OSError):  # the state names it
        return replace(read_view(state.run, LiveStatusReader(state.run)), state=state)
    return RunView(state.run, state)


def _waiting(state: RunState) -> dict[str, Any] | None:
    from hpcrl.errors import ConfigError, RunError
    from hpcrl.observe.advice import advise

    with suppress(ConfigError, RunError, OSError):  # the state names it
        advised = advise(state.run)
        return advised.to_json() if advised else None
    return None


def _goodput(state: RunState) -> dict[str, Any] | None:
    from hpcrl.errors import RunError
    from hpcrl.observe.goodput import account_of

    with suppress(RunError, OSError):  # the state names it
        account = account_of(state.run)
        return account.to_json() if account else None
    return None


def _as_json(state: RunState, with_size: bool, *, with_goodput: bool = False) -> dict[str, Any]:
    from dataclasses import asdict

    from hpcrl.launch.manage.remove import sizes_of
    from hpcrl.launch.manage.users import owner_of, user_name
    from hpcrl.observe.summary import summarise
    from hpcrl.rundir.evaluations import begun_evaluations
    from hpcrl.upload.state import upload_states

    job, summary = state.job, _achieved(state, summarise)
    return {
        "run": state.run.name,
        "project": state.run.project,
        "path": str(state.run.path),
        "user": user_name(owner_of(state.run.path)),
        "state": state.kind,
        "detail": state.detail,
        "advice": state.advice,
        "over": state.over,
        "executor": state.submission.get("executor"),
        "job": {"id": state.submission.get("job_id"), "state": job.name, "reason": job.reason, "start": job.start},
        "requests": {
            name: {"id": number, "state": one.name, "reason": one.reason, "start": one.start}
            for name, (number, one) in state.requests.items()
            if name
        },
        "overrides": state.submission.get("overrides", []),
        "attempt": state.attempt,
        "layout": state.layout,
        "outcome": asdict(state.outcome) if state.outcome else None,
        "progress": {**asdict(state.progress), "eta": state.progress.eta},
        "summary": {name: value for name, value in asdict(summary).items() if name != "outcome"} if summary else None,
        "waiting": _waiting(state),
        "goodput": _goodput(state) if with_goodput else None,  # it reads all timelines
        "alerts": [{**asdict(alert.begin), "cleared": alert.cleared} for alert in _alerts(state.run)],
        "uploads": {store: asdict(upload) for store, upload in upload_states(state.run).items()},
        "evaluation": {"job": state.submission.get("evaluation"), "waiting": begun_evaluations(state.run)},
        "processes": [asdict(status) for status in state.statuses],
        **({"bytes": sizes_of(state.run)} if with_size else {}),
    }
