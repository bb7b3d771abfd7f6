"""`hpcrl resume`: start the next attempt of a run, or of each run of a sweep, that ended early."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from hpcrl.cli._common import add_runs, announce, each_run, follow

if TYPE_CHECKING:
    from hpcrl.rundir.layout import Run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_runs(parser)
    parser.add_argument(
        "settings", nargs="*", metavar="KEY=VALUE", help="settings to change; what cannot be is refused"
    )
    parser.add_argument("--follow", action="store_true", help="show progress until the run is over")
    parser.set_defaults(action=_resume)


def _resume(arguments: argparse.Namespace) -> int:
    from hpcrl.launch.manage.resume import resume
    from hpcrl.planning.layouts import memory_problems_apart

    resumed: list[Run] = []

    def act(run: Run) -> None:
        for change in resume(run, arguments.settings, [memory_problems_apart]):
            print(f"  {change}")
        announce(run)
        resumed.append(run)

    code = each_run(arguments, act)
    return (follow(resumed) or code) if arguments.follow and resumed else code
