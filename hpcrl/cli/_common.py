"""What commands have in common: the run that they are about, overrides, and how they follow runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcrl.rundir.layout import Run

RUNS = "name, project/name or path of a run, or the name of a sweep"
"""Help of the argument that names runs."""


def add_root(parser: argparse.ArgumentParser) -> None:
    """Add the option that says where runs are."""
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
    from hpcrl.launch.manage.registry import default_root, find_run

    return find_run(arguments.run, arguments.root or default_root())


def positive(text: str) -> int:
    """Return the number from 1 that an option was given."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1, found {text!r}")
    return int(text)


def split(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the files, or names, and the overrides among the words of a command line."""
    return [word for word in words if "=" not in word], [word for word in words if "=" in word]


def announce(run: Run) -> None:
    """Print where a run that was started is, and the commands for it."""
    from hpcrl.rundir.commit import read_json

    record = read_json(run.submission)
    assert record, run.submission
    print(f"{run.name}: {record['executor']} job {record['job_id']}, {run.path}")
    print(f"  hpcrl status {short_name(run)}    hpcrl logs -f {short_name(run)}    hpcrl cancel {short_name(run)}")


def short_name(run: Run) -> str:
    """Return how a command line may name a run: by its name where runs are looked for, else by its path."""
    from hpcrl.launch.manage.registry import default_root

    known = run.path.parent.parent == default_root().absolute()
    return run.name if known else str(run.path)


def follow(runs: list[Run]) -> int:
    """Show the first run until all are over; return 1 if one of them failed."""
    from hpcrl.launch.manage.poll import RunPoller
    from hpcrl.launch.manage.registry import known_states, states_of
    from hpcrl.observe import view

    try:
        for run in runs:
            view.follow(run, RunPoller(run, known_states).over)
    except KeyboardInterrupt:
        print(f"\nThe run goes on. hpcrl cancel {short_name(runs[0])} ends it.")
        return 0
    states = states_of(runs)
    for state in states:
        if state.kind != "done":
            print(f"{state.run.name}: {state.kind}: {state.detail}")
    return int(any(state.kind not in ("done", "cancelled", "interrupted") for state in states))
