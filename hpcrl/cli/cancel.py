"""`hpcrl cancel`: save, stop and take a run off the cluster."""

from __future__ import annotations

import argparse

from hpcrl.cli._common import add_run, named_run

_CANCEL_S = 150.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("--now", action="store_true", help="do not wait until the state is saved")
    parser.set_defaults(action=_cancel)


def _cancel(arguments: argparse.Namespace) -> int:
    from hpcrl.launch.manage.cancel import cancel

    state = cancel(named_run(arguments), 0.0 if arguments.now else _CANCEL_S)
    print(f"{state.run.name}: {state.kind}: {state.detail}")
    if not state.over:
        print("It was asked to save and to stop, and will; `hpcrl cancel --now` does not wait for that.")
    return 0
