"""`hpcrl rm`: remove runs that are over."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from hpcrl.cli._common import add_runs, each_run

if TYPE_CHECKING:
    from hpcrl.rundir.layout import Run


_KEPT = {
    "metrics": ", but for its metrics",
    "last": ", but for its last checkpoint, exports, samples and metrics",
    "export": ", but for its exports, samples and metrics",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_runs(parser)
    parser.add_argument(
        "--keep",
        choices=("metrics", "last", "export"),
        help="metrics: configuration, metrics, curves, evaluations and logs stay. last: all stays that trainer.keep_when_done keeps, "
        "with the last checkpoint. export: the same, without checkpoints whose step is exported",
    )
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")
    parser.set_defaults(action=_rm)


def _rm(arguments: argparse.Namespace) -> int:
    from hpcrl.errors import RunError
    from hpcrl.launch.manage.remove import remove, sizes_of
    from hpcrl.units import readable_size

    def act(run: Run) -> None:
        before, keep = sum(sizes_of(run).values()), _KEPT.get(arguments.keep, "")
        what = f"{run.path}, {readable_size(before)}"
        if not arguments.yes:
            if not sys.stdin.isatty():
                raise RunError(f"remove {what}? there is no terminal to ask on; --yes removes it")
            if input(f"remove {what}{keep}? [y/N] ").strip().lower() not in ("y", "yes"):
                print(f"{run.name} was not removed")
                return
        remove(run, arguments.keep)
        left = f"; {readable_size(sum(sizes_of(run).values()))} left" if keep else ""
        print(f"removed {what}{keep}{left}")

    return each_run(arguments, act)
