"""What the commands about one run have in common: how it is named, and how it is found."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcrl.run.layout import Run


def add_run_command(
    commands: argparse._SubParsersAction, name: str, text: str, action: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    """Add a command about one run, which `named_run` gives to its action, and return its parser."""
    parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.add_argument("--root", type=Path, help="where runs are looked for (default: $HPCRL_ROOT, else ./runs)")
    parser.add_argument("run", metavar="RUN", help="name, project/name or path")
    parser.set_defaults(action=action)
    return parser


def named_run(arguments: argparse.Namespace) -> Run:
    """Return the run that a command was given.

    Raises:
        RunError: none, or several, match.
    """
    from hpcrl.launch.registry import default_root, find_run

    return find_run(arguments.run, arguments.root or default_root())


def positive(text: str) -> int:
    """Return the number from 1 that an option was given."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1, found {text!r}")
    return int(text)
