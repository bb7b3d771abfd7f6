"""Shared arguments of commands: the run, overrides, and `--follow`."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrl.errors import HpcrlError
from hpcrl.text import one_line, printable

if TYPE_CHECKING:
    from hpcrl.rundir.layout import Run


class Subcommands:
    """Adds the subcommands of a command to its parser."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._group = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(self, name: str, text: str, action: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        command = self._group.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        command.set_defaults(action=action)
        return command


RUNS = "name, project/name or path of a run, or the name of a sweep"
"""Help of the argument that names runs."""


def add_root(parser: argparse.ArgumentParser) -> None:
    """Add the option `--root`."""
    parser.add_argument("--root", type=Path, help="where runs are looked for (default: $HPCRL_ROOT, else ./runs)")


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the arguments by which `named_run` finds a run."""
    add_root(parser)
    parser.add_argument("run", metavar="RUN", help="name, project/name or path")


def named_run(arguments: argparse.Namespace) -> Run:
    """Return the run that a command was given.

    Raises:
        RunError: none, or several, match.
    """
    from hpcrl.launch.manage.registry import find_run
    from hpcrl.rundir.layout import default_root

    return find_run(arguments.run, arguments.root or default_root())


def add_runs(parser: argparse.ArgumentParser) -> None:
    """Add the arguments by which `each_run` finds a run, or those of a sweep."""
    add_root(parser)
    parser.add_argument("run", metavar="RUN", help=RUNS)


def each_run(arguments: argparse.Namespace, act: Callable[[Run], None], at_once: int = 1) -> int:
    """Do something with the run that a command was given, or with each run of the sweep; return the exit code.

    In a sweep, the error of one run is printed and the other runs follow; the exit code is then that of the first error.

    Args:
        at_once: runs of a sweep with which it is done at the same time.
    """
    from concurrent.futures import ThreadPoolExecutor

    from hpcrl.launch.manage.registry import find_runs
    from hpcrl.rundir.layout import default_root

    runs = find_runs(arguments.run, arguments.root or default_root())
    if len(runs) == 1:
        act(runs[0])
        return 0

    def exit_code(run: Run) -> int:
        try:
            act(run)
        except HpcrlError as error:
            print(f"hpcrl: {printable(str(error))}", file=sys.stderr)
            return error.exit_code
        return 0

    if at_once == 1:  # in the main thread, which alone can start a run on this machine
        codes = list(map(exit_code, runs))
    else:
        with ThreadPoolExecutor(at_once) as pool:
            codes = list(pool.map(exit_code, runs))
    return next(filter(None, codes), 0)


def positive(text: str) -> int:
    """Return the number from 1 that an option was given."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1, found {text!r}")
    return int(text)


def split(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the files, or names, and the overrides among the words of a command line; what exists is a file, whatever its name.

    A ~ that the shell has left, as in quotes, is the home.
    """
    overrides = [word for word in words if "=" in word and not os.path.exists(os.path.expanduser(word))]
    return [os.path.expanduser(word) for word in words if word not in overrides], overrides


def note_empty_values(settings: Sequence[str]) -> None:
    """Print which texts an override such as `trainer.run_name=$NAME` leaves empty; of other settings that is an error."""
    empty = [word.strip().removesuffix("=") for word in settings if re.fullmatch(r"[^=]+=\s*", word)]
    if not empty:
        return
    from hpcrl.config import Config
    from hpcrl.config.difference import value_as_toml
    from hpcrl.config.fields import settings as settings_of
    from hpcrl.config.load import emptiable

    known = settings_of(Config)
    for path in empty:
        if emptiable(path, known):
            setting = next((one for one in known if one.path == path), None)
            if setting is None:  # a key of a table whose keys are the user's
                what = "is left out"
            elif setting.required:
                what = "is not set"
            else:
                what = f"goes back to its default, {value_as_toml(setting.default)}"
            print(f"hpcrl: {printable(path)}= has no value and {what}", file=sys.stderr)


def announce(run: Run) -> None:
    """Print where a run that was started is, and the commands for it."""
    from hpcrl.launch.requeue.requests import requests_of
    from hpcrl.rundir.commit import read_json

    record = read_json(run.submission)
    assert record, run.submission
    jobs = [f"{name} {job}".lstrip() for name, job in requests_of(record).items()]
    print(f"{run.name}: {record['executor']} job {', '.join(jobs)}, {run.path}")
    print(f"  hpcrl status {short_name(run)}    hpcrl logs -f {short_name(run)}    hpcrl cancel {short_name(run)}")


def short_name(run: Run) -> str:
    """Return how a command line may name a run: by its name where runs are looked for, else by its path."""
    from hpcrl.rundir.layout import default_root

    known = run.path.parent.parent == default_root().absolute()
    return run.name if known else shlex.quote(str(run.path))


def follow(runs: list[Run]) -> int:
    """Show runs until all are over; return 1 if one of them failed."""
    from hpcrl.launch.manage import follow
    from hpcrl.launch.manage.registry import states_of

    try:
        follow.follow(runs)
    except KeyboardInterrupt:
        name = short_name(runs[0])
        print(f"\nThe run goes on. hpcrl follow {name} shows it again, hpcrl cancel {name} ends it.")
        return 0
    states = states_of(runs)
    for state in states:
        if state.kind != "done":
            print(one_line(f"{state.run.name}: {state.kind}: {state.detail}"))
    return int(any(state.kind not in ("done", "cancelled", "interrupted") for state in states))
