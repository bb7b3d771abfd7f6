"""`hpcrl stacks`: show the stacks of every process of a run."""

from __future__ import annotations

import argparse

from hpcrl.cli._common import add_run, named_run
from hpcrl.text import printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.set_defaults(action=_stacks)


def _stacks(arguments: argparse.Namespace) -> int:
    from hpcrl.launch.attach.stacks import stacks

    for process, text in stacks(named_run(arguments)).items():
        print(printable(f"== {process}\n{text}"))
    return 0
