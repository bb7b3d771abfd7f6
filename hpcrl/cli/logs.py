"""`hpcrl logs`: print the logs of a run."""

from __future__ import annotations

import argparse

from hpcrl.cli._common import add_run, named_run
from hpcrl.rundir.process_names import JOBS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the run is over")
    roles = (*JOBS, "engine", "controller", "evaluation", "agent")
    parser.add_argument("--role", choices=roles, help="only this role")
    parser.add_argument("--attempt", type=int, metavar="N", help="another attempt than the newest")
    parser.set_defaults(action=_logs)


def _logs(arguments: argparse.Namespace) -> int:
    from hpcrl.errors import RunError
    from hpcrl.launch.manage import logs
    from hpcrl.launch.manage.poll import RunPoller
    from hpcrl.launch.manage.registry import known_states

    run = named_run(arguments)
    if arguments.follow and arguments.attempt:
        raise RunError("--follow shows all attempts; leave out --attempt, or --follow")
    if arguments.follow:
        try:
            logs.follow(run, arguments.role, RunPoller([run], known_states).over)
        except KeyboardInterrupt:
            return 0
    else:
        logs.show(run, arguments.role, arguments.attempt)
    return 0
