"""`hpcrl sync`: send the metrics of a run to a tracker, from any machine that reads its directory."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from hpcrl.cli._common import add_runs, each_run

if TYPE_CHECKING:
    from hpcrl.rundir.layout import Run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_runs(parser)
    parser.add_argument(
        "--to",
        required=True,
        metavar="TRACKER",
        help="wandb, mlflow, swanlab, trackio, console, or package.module:function",
    )
    parser.add_argument("--anew", action="store_true", help="as a run of its own, with all that counts now")
    parser.set_defaults(action=_sync)


def _sync(arguments: argparse.Namespace) -> int:
    from hpcrl.observe.trackers.send import MetricSender

    def send(run: Run) -> None:
        _require_no_other(run, arguments.to)
        sender = MetricSender(run, arguments.to, arguments.anew)
        count = sender.send()
        sender.close()
        print(f"{run.name}: {count} values sent to {arguments.to}")

    return each_run(arguments, send)


def _require_no_other(run: Run, name: str) -> None:
    """Refuse where an attempt that goes on sends to the same tracker, because values would be sent twice."""
    from hpcrl.config import Config
    from hpcrl.errors import RunError
    from hpcrl.launch.manage.registry import states_of
    from hpcrl.observe.trackers.base import trackers_of

    if name in trackers_of(Config.from_toml([run.config]).trainer.logger) and not states_of([run])[0].over:
        raise RunError(
            f"{run.name} is not over, and sends to {name} itself; wait for its end, see `hpcrl follow {run.name}`"
        )
