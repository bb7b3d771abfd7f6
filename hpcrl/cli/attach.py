"""`hpcrl attach`: open a shell, or run a command, on a node of a running run."""

from __future__ import annotations

import argparse

from hpcrl.cli._common import add_run, named_run
from hpcrl.rundir.process_names import PROGRAMS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.usage = f"hpcrl attach [-h] [--root ROOT] [--node N] [--role {{{','.join(PROGRAMS)}}}] RUN [-- COMMAND ...]"
    parser.epilog = "example: hpcrl attach my-run --role rollout -- nvidia-smi"
    parser.add_argument("--node", metavar="N", help="number of the node in the run, or its name (default: the first)")
    parser.add_argument("--role", choices=tuple(PROGRAMS), help="the first node of this role")
    parser.set_defaults(action=_attach, command=[])


def _attach(arguments: argparse.Namespace) -> int:
    from hpcrl.launch.attach.attach import attach

    run = named_run(arguments)
    attach(run, arguments.node, arguments.role, arguments.command)
