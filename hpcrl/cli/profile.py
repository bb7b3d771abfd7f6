"""`hpcrl profile`: show where a process of a running run spends its time."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hpcrl.cli._common import add_run, named_run, positive
from hpcrl.text import printable

_SUFFIX = {"flamegraph": ".svg", "speedscope": ".speedscope.json"}
_LISTED = 25


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from hpcrl.launch.attach.profile import PROFILED_ROLES

    add_run(parser)
    parser.epilog = "py-spy (pip install 'hpcrl[profile]') samples it 100 times per second; it runs on meanwhile."
    parser.add_argument("--role", choices=PROFILED_ROLES, default="trainer", help="what the process is (trainer)")
    parser.add_argument(
        "--rank", type=int, default=0, metavar="N", help="which trainer rank, replica, scorer or service (0)"
    )
    parser.add_argument("--seconds", type=positive, default=10, metavar="S", help="for how long (10)")
    parser.add_argument(
        "--format",
        choices=("flamegraph", "speedscope", "top"),
        default="flamegraph",
        help="an SVG, JSON for https://www.speedscope.app, or a table of the busiest functions (flamegraph)",
    )
    parser.add_argument("--idle", action="store_true", help="sample threads that wait, too")
    parser.add_argument(
        "-o",
        dest="output",
        type=Path,
        metavar="FILE",
        help="where to (RUN-PROCESS.svg or .speedscope.json; top: standard output)",
    )
    parser.set_defaults(action=_profile)


def _profile(arguments: argparse.Namespace) -> int:
    from hpcrl.launch.attach.profile import busiest, sample

    run, top = named_run(arguments), arguments.format == "top"
    kind = "raw" if top else arguments.format
    process, found = sample(run, arguments.role, arguments.rank, arguments.seconds, kind, idle=arguments.idle)
    if top:
        rows = busiest(found.decode(errors="replace"), _LISTED)
        lines = [f"{own:6.1%} {whole:6.1%}  {name}" for name, own, whole in rows]
        found = "\n".join(
            [f"{process} of {run.name}: share of samples in a function, and with what it calls", *lines, ""]
        ).encode()
    if top and not arguments.output:
        print(printable(found.decode()), end="")
        return 0
    path = arguments.output or Path(f"{run.name}-{process}{_SUFFIX[arguments.format]}")
    path.write_bytes(found)
    print(path, file=sys.stderr)
    return 0
