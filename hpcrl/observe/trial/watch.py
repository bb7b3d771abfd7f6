"""Looks at a trial from one of its runs, and stops that run once its recipe is stopped: python -m hpcrl.observe.trial.watch RUN ATTEMPT

It is a process beside the controller, so that it cannot block the run, and ends with its standard input. No process outside the runs is
needed: each run looks, the first one to write a look decides, and each stops itself alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from hpcrl.errors import DataError, HpcrlError, RunError
from hpcrl.observe.trial.judge import steps_evaluated, stopped_recipes, take_looks
from hpcrl.observe.trial.plan import TrialFolder, trial_of
from hpcrl.rundir.layout import Run
from hpcrl.runtime.followers import more
from hpcrl.runtime.signals import ask_to_stop

_MODULE = "hpcrl.observe.trial.watch"
_POLL_S = 10.0


def trial_process(run: Run, attempt: int) -> dict[str, list[str]]:
    """Return the command of the process that looks at a run's trial, by name; empty where the run is in none."""
    return {"trial": [_MODULE, str(run.path), str(attempt)]} if trial_of(run) else {}


def look(folder: TrialFolder, run: Run, attempt: int) -> bool:
    """Look at the trial once, and ask the run to stop where its recipe is stopped; return whether it was asked."""
    looks, trial = take_looks(folder), folder.read()
    for recipe, by in stopped_recipes(looks).items():
        if run.name in trial.recipes.get(recipe, ()) and trial.steps not in steps_evaluated(run):
            cause = f"trial {folder.name}: recipe {recipe} cannot win any more (look {by.number}, at step {by.step})"
            ask_to_stop(run, attempt, "cancelled", cause)
            print(cause, flush=True)
            return True
    return False


def main(path: str, attempt: int, again: Callable[[], bool]) -> None:
    """Look until `again` returns False or the run was asked to stop; what cannot be read is looked at again."""
    run = Run.open(path)
    folder, goes_on, asked = trial_of(run), True, False
    while folder and goes_on and not asked:
        goes_on = again()
        try:
            asked = look(folder, run, attempt)
        except (OSError, DataError, RunError) as error:
            print(f"no look: {error}", flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]), lambda: more(_POLL_S))
    except HpcrlError as error:
        sys.exit(f"{type(error).__name__}: {error}")
