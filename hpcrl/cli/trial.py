"""`hpcrl trial`: run recipes over seeds, compare them while they run, and print the verdict."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrl.cli._common import add_root, announce, follow, positive, split
from hpcrl.text import one_line, printable

if TYPE_CHECKING:
    from hpcrl.observe.trial.plan import TrialFolder

STATUS = "status"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_root(parser)
    parser.description = (
        "Run each recipe, a TOML file, over seeds as one job array, stop those that cannot win any more, and tell which is better. "
        "`hpcrl trial status NAME` prints what is known of a trial."
    )
    parser.epilog = "example: hpcrl trial low.toml high.toml --base base.toml --seeds 5; then: hpcrl trial status NAME"
    parser.add_argument(
        "settings", nargs="+", metavar="FILE|KEY=VALUE", help="recipes, then overrides of all; or: status NAME"
    )
    parser.add_argument(
        "--base", action="append", type=Path, default=[], metavar="FILE", help="merged before each recipe; repeatable"
    )
    parser.add_argument("--seeds", type=positive, default=5, help="runs of each recipe (5)")
    parser.add_argument("--effect", type=float, default=0.02, help="least difference of scores that matters (0.02)")
    parser.add_argument("--name", default="", help="of the trial (default: of its first recipe, and the time)")
    parser.add_argument("--local", action="store_true", help="all runs at once on this machine, without Slurm")
    parser.add_argument("--dry-run", action="store_true", help="print the runs and what so many seeds can find")
    parser.add_argument("--follow", action="store_true", help="show progress until the runs are over")
    parser.add_argument("--json", action="store_true", help="with status: print it as JSON")
    parser.set_defaults(action=_trial)


def _trial(arguments: argparse.Namespace) -> int:
    if arguments.settings[0] == STATUS:
        return _status(arguments)
    from dataclasses import replace

    from hpcrl.launch.submit import submit
    from hpcrl.launch.submit.trial import trial_submission
    from hpcrl.planning.layouts import memory_problems_apart

    files, overrides = split(arguments.settings)
    recipes = [Path(name) for name in files]
    submission, warnings = trial_submission(
        recipes, arguments.base, overrides, arguments.name, arguments.seeds, arguments.effect
    )
    checks = (memory_problems_apart,)
    submission = replace(submission, elements=[replace(each, checks=checks) for each in submission.elements])
    for warning in warnings:
        print(f"hpcrl: {printable(warning)}", file=sys.stderr)
    for line in _plan(len(recipes), arguments.seeds, arguments.effect):
        print(line)
    if arguments.dry_run:
        for run, element in zip(submission.runs, submission.elements, strict=True):
            print(one_line(f"{run.path}  {' '.join(element.overrides)}".rstrip()))
        print("dry run: nothing was submitted")
        return 0
    if not arguments.local:
        submit.require_slurm()
    runs = submit.submit(submission, arguments.local)
    for run in runs:
        announce(run)
    print(one_line(f"hpcrl trial status {submission.folder.name}"))
    return follow(runs) if arguments.follow else 0


def _plan(recipes: int, seeds: int, effect: float) -> list[str]:
    from math import sqrt

    from hpcrl.observe.trial.statistics import ALPHA, POWER, largest_deviation, level_of_look

    spread = largest_deviation(seeds, effect, level_of_look(1.0, sqrt(0.5), recipes))
    return [
        f"{recipes} recipes, {seeds} seeds of each; a verdict is wrong with {ALPHA:.0%} at most, over all looks and pairs",
        f"a difference of {effect:g} is found with {POWER:.0%} if the scores of one recipe's runs differ by {spread:.4f} (standard deviation)",
    ]


def _status(arguments: argparse.Namespace) -> int:
    from json import dumps

    from hpcrl.errors import ConfigError
    from hpcrl.observe.trial.plan import find_trial
    from hpcrl.observe.trial.report import describe_trial, trial_lines
    from hpcrl.rundir.layout import default_root

    if len(arguments.settings) != 2:
        raise ConfigError("name one trial: hpcrl trial status NAME")
    folder = find_trial(arguments.settings[1], arguments.root or default_root())
    ended = _ended(folder)
    found = describe_trial(folder, lambda name: name in ended)
    print(dumps(found, indent=2) if arguments.json else "\n".join(map(one_line, trial_lines(found))))
    return 0


def _ended(folder: TrialFolder) -> set[str]:
    """Return the runs of a trial that train no more, failed ones too, by the scheduler where it answers."""
    from hpcrl.launch.manage.registry import known_states

    runs = [folder.run(name) for own in folder.read().recipes.values() for name in own]
    there = [run for run in runs if run.config.is_file()]
    over = {state.run.name for state in known_states(there) if state.over}
    return over | {run.name for run in runs if run not in there}
