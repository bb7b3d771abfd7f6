"""`hpcrl goodput`: print what the nodes of runs did, as shares of all their time."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrl.cli._common import RUNS, add_root
from hpcrl.text import one_line

if TYPE_CHECKING:
    from hpcrl.observe.goodput import Account
    from hpcrl.rundir.layout import Run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_root(parser)
    parser.add_argument("runs", nargs="*", metavar="RUN", help=f"{RUNS}; several are added up")
    parser.add_argument("--project", metavar="NAME", help="all runs of a project that you may read, added up")
    parser.add_argument("--json", action="store_true", help="a JSON object")
    parser.set_defaults(action=_goodput)


def _goodput(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict
    from json import dumps

    from hpcrl.errors import RunError
    from hpcrl.observe.first_step import first_steps
    from hpcrl.observe.goodput import Account, account_of

    accounts, runs = dict[str, Account](), _runs(arguments)
    for run in runs:
        try:
            found = account_of(run)
        except (RunError, OSError) as error:
            if len(runs) == 1:
                raise
            print(one_line(f"hpcrl: {run.name} is left out: {error}"), file=sys.stderr)
            continue
        if found:
            accounts[f"{run.project}/{run.name}"] = found
    if not accounts:
        raise RunError("none of these runs has a record of its nodes: none has begun, or an earlier hpcrl made them")
    whole = sum(accounts.values(), Account([]))
    first = [each for run in runs if f"{run.project}/{run.name}" in accounts for each in first_steps(run)]
    if arguments.json:
        steps = [asdict(each) for each in first]
        print(dumps({"runs": sorted(accounts), **whole.to_json(), "first_steps": steps}, indent=2))
        return 0
    own = [run for run in runs if f"{run.project}/{run.name}" in accounts]
    of_one = [*map(str, first), *_layouts(own[0])] if len(own) == 1 else []
    for line in [*_lines(whole, accounts), *of_one]:
        print(one_line(line))
    return 0


def _runs(arguments: argparse.Namespace) -> list[Run]:
    from hpcrl.errors import ConfigError, RunError
    from hpcrl.launch.manage.registry import all_runs, find_runs
    from hpcrl.rundir.layout import default_root

    root: Path = arguments.root or default_root()
    if bool(arguments.runs) == bool(arguments.project):
        raise ConfigError("name runs, or a project with --project")
    found = [run for name in arguments.runs for run in find_runs(name, root)]
    if arguments.project:
        found = [run for run in all_runs(root) if run.project == arguments.project]
        if not found:
            raise RunError(f"no run of a project {arguments.project!r} under {root.absolute()} that you may read")
    return list(dict.fromkeys(found))


def _lines(whole: Account, accounts: dict[str, Account]) -> list[str]:
    from hpcrl.observe.goodput import node_time
    from hpcrl.observe.node_seconds import CATEGORIES
    from hpcrl.units import duration

    of = f" of {len(accounts)} runs" if len(accounts) > 1 else ""
    queue = f", and {duration(whole.queued)} in the queue" if whole.queued >= 1 else ""
    lines = [f"goodput {whole.goodput:.1%}{of}: {node_time(whole.total)}{queue}"]
    for category in CATEGORIES:
        if share := whole.share(category):
            parts = ", ".join(f"{what} {part:.1%}" for what, part in whole.parts(category) if part >= 0.0005)
            time = node_time(share * whole.total)
            lines.append(f"  {category:17} {share:6.1%}  {time:>18}  {parts}".rstrip())
    if len(accounts) > 1:
        return lines + [f"{name}: goodput {account}" for name, account in accounts.items()]
    return lines + [_row(whole, index) for index in range(len(whole.rows))]


def _layouts(run: Run) -> list[str]:
    from hpcrl.rundir.ledger import read_attempts

    return [f"attempt {one.number} took {one.layout}" for one in read_attempts(run) if one.layout]


def _row(whole: Account, index: int) -> str:
    from hpcrl.observe.goodput import Account

    row = whole.rows[index]
    where = f"attempt {row.attempt}" if row.attempt else "all attempts"
    return f"{where}, {row.role}, {row.nodes} node{'s' * (row.nodes > 1)}: goodput {Account([row])}"
