"""`hpcrl verify`: compare the files of a run directory with their checksums."""

from __future__ import annotations

import argparse

from hpcrl.cli._common import add_runs, each_run
from hpcrl.text import one_line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_runs(parser)
    parser.set_defaults(action=_verify)


def _verify(arguments: argparse.Namespace) -> int:
    from hpcrl.errors import DataError
    from hpcrl.launch.manage.verify import PARTS
    from hpcrl.rundir.layout import Run

    def act(run: Run) -> None:
        print(f"{run.name}, {run.path}")
        damaged = 0
        for part in PARTS:
            found = list(part.damaged(run))
            damaged += len(found)
            print(f"  {part.what}: {f'{len(found)} damaged: {part.remedy}' if found else 'ok'}")
            for sentence in found:
                print(one_line(f"    {sentence}"))
        if damaged:
            raise DataError(f"{run.name}: {damaged} files are not as they were written")

    return each_run(arguments, act)
