"""`hpcrl tensorboard`: print the command that shows the curves of runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from hpcrl.cli._common import RUNS, add_root


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_root(parser)
    parser.add_argument("runs", nargs="+", metavar="RUN", help=RUNS)
    parser.add_argument("--rebuild", action="store_true", help="write RUN/tensorboard again from RUN/metrics")
    parser.add_argument("--port", type=int, default=6006, help="of the server (6006)")
    parser.set_defaults(action=_tensorboard)


def _tensorboard(arguments: argparse.Namespace) -> int:
    from shlex import join
    from socket import gethostname

    from hpcrl.launch.manage.registry import find_runs
    from hpcrl.observe.tensorboard.event_file import rebuild
    from hpcrl.rundir.layout import default_root

    root = arguments.root or default_root()
    runs = list(dict.fromkeys(run for name in arguments.runs for run in find_runs(name, root)))
    for run in runs:
        if arguments.rebuild or not run.events.is_dir():
            rebuild(run)
    if len(runs) == 1:
        logs = ["--logdir", str(runs[0].tensorboard)]
    else:
        alike = len({run.name for run in runs}) < len(runs)
        named = (f"{run.project}:{run.tensorboard}" if alike else str(run.tensorboard) for run in runs)
        logs = ["--logdir_spec", ",".join(named)]
    print(join([_program(), *logs, "--host", "127.0.0.1", "--port", str(arguments.port)]))
    print(f"opens at: http://127.0.0.1:{arguments.port}/#custom_scalars")
    print(f"from your own machine: ssh -L {arguments.port}:127.0.0.1:{arguments.port} {gethostname()}")
    return 0


def _program() -> str:
    """Return the name of TensorBoard where the shell would find it, else its path beside this Python."""
    from shutil import which
    from sys import executable

    return "tensorboard" if which("tensorboard") else str(Path(executable).parent / "tensorboard")
