"""`hpcrl cancel`: save, stop and take a run, or a sweep, off the cluster."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from hpcrl.cli._common import add_runs, each_run
from hpcrl.text import printable

if TYPE_CHECKING:
    from hpcrl.launch.manage.state import RunState
    from hpcrl.rundir.layout import Run

_CANCEL_S = 150.0
_AT_ONCE = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_runs(parser)
    parser.add_argument("--now", action="store_true", help="do not wait until the state is saved")
    parser.set_defaults(action=_cancel)


def _cancel(arguments: argparse.Namespace) -> int:
    from hpcrl.launch.manage.cancel import cancel

    def act(run: Run) -> None:
        state = cancel(run, 0.0 if arguments.now else _CANCEL_S, _waiting)
        message = f"{state.run.name}: {state.kind}: {state.detail}\n"
        if not state.over:
            message += "It was asked to save and to stop, and will; `hpcrl cancel --now` does not wait for that.\n"
        # in one write: other runs of the sweep are cancelled at the same time
        print(printable(message), end="", flush=True)

    return each_run(arguments, act, _AT_ONCE)


def _waiting(state: RunState) -> None:
    detail = f"{state.run.name}: waiting until it has saved and stopped ({state.detail}); --now does not wait"
    print(printable(detail), file=sys.stderr, flush=True)
