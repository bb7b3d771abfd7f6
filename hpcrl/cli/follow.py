"""`hpcrl follow`: show a run, or a sweep, until it is over, as `hpcrl submit --follow` does."""

from __future__ import annotations

import argparse

from hpcrl.cli._common import add_runs, follow


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_runs(parser)
    parser.set_defaults(action=_follow)


def _follow(arguments: argparse.Namespace) -> int:
    from hpcrl.launch.manage.registry import find_runs
    from hpcrl.rundir.layout import default_root

    return follow(find_runs(arguments.run, arguments.root or default_root()))
