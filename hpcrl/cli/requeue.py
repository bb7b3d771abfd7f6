"""`hpcrl requeue`: let a run, or each of a sweep, save and go back into the queue."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from hpcrl.cli._common import add_runs, each_run, short_name

if TYPE_CHECKING:
    from hpcrl.rundir.layout import Run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_runs(parser)
    parser.set_defaults(action=_requeue)


def _requeue(arguments: argparse.Namespace) -> int:
    from hpcrl.launch.manage.cancel import requeue

    def act(run: Run) -> None:
        requeue(run)
        print(f"{run.name} was asked to save and to go back into the queue; hpcrl status {short_name(run)} shows it")

    return each_run(arguments, act)
