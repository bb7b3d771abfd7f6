"""`hpcrl rm`: remove runs that are over."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from hpcrl.cli._common import add_runs, each_run

if TYPE_CHECKING:
    from hpcrl.rundir.layout import Run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_runs(parser)
    parser.add_argument(
        "--keep-metrics",
        action="store_true",
        help="keep configuration, metrics, curves, evaluations and logs; remove checkpoints, weights, exports, samples and dumps",
    )
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")
    parser.set_defaults(action=_rm)


def _rm(arguments: argparse.Namespace) -> int:
    from hpcrl.errors import RunError
    from hpcrl.launch.manage.remove import remove, sizes_of
    from hpcrl.units import readable_size

    def act(run: Run) -> None:
        what = f"{run.path}, {readable_size(sum(sizes_of(run).values()))}"
        if not arguments.yes:
            if not sys.stdin.isatty():
                raise RunError(f"remove {what}? there is no terminal to ask on; --yes removes it")
            kept = ", but for its metrics" if arguments.keep_metrics else ""
            if input(f"remove {what}{kept}? [y/N] ").strip().lower() not in ("y", "yes"):
                print(f"{run.name} was not removed")
                return
        remove(run, keep_metrics=arguments.keep_metrics)
        print(f"removed {what}" + (", but for its metrics" if arguments.keep_metrics else ""))

    return each_run(arguments, act)
