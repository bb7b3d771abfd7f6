"""`hpcrl resume`: start the next attempt of a run that ended early."""

from __future__ import annotations

import argparse

from hpcrl.cli._common import add_run, announce, follow, named_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument(
        "settings", nargs="*", metavar="KEY=VALUE", help="settings to change; what cannot be is refused"
    )
    parser.add_argument("--follow", action="store_true", help="show progress until the run is over")
    parser.set_defaults(action=_resume)


def _resume(arguments: argparse.Namespace) -> int:
    from hpcrl.launch.manage.resume import resume

    run = named_run(arguments)
    for change in resume(run, arguments.settings):
        print(f"  {change}")
    announce(run)
    return follow([run]) if arguments.follow else 0
