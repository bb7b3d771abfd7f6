"""`hpcrl requeue`: save, and go back into the queue."""

from __future__ import annotations

import argparse

from hpcrl.cli._common import add_run, named_run, short_name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.set_defaults(action=_requeue)


def _requeue(arguments: argparse.Namespace) -> int:
    from hpcrl.launch.manage.requeue import requeue

    run = named_run(arguments)
    requeue(run)
    print(f"{run.name} was asked to save and to go back into the queue; hpcrl status {short_name(run)} shows it")
    return 0
