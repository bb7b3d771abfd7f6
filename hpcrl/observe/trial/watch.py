"""Looks at a trial from one of its runs, and stops that run once its recipe is stopped: python -m hpcrl.observe.trial.watch RUN ATTEMPT

It is a process beside the controller, so that it cannot block the run, and ends with its standard input. No process outside the runs is
needed: each run looks, the first one to write a look decides, and each stops itself alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from hpcrl.errors import DataError, HpcrlError, RunError
from hpcrl.observe.trial.judge import steps_evaluated, stopped_recipes, take_looks
from hpcrl.observe.trial.plan import TrialFolder, trial_of
from hpcrl.rundir.commit import children
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import cancel_outcome, outcome_of, read_attempts
from hpcrl.runtime.followers import more
from hpcrl.runtime.signals import ask_to_stop

_MODULE = "hpcrl.observe.trial.watch"
_POLL_S = 10.0
_EVERYTHING_S = 120.0  # what another run has just evaluated may not be seen yet through a network filesystem


def trial_process(run: Run, attempt: int) -> dict[str, list[str]]:
    """Return the command of the process that looks at a run's trial, by name; empty where the run is in none."""
    return {"trial": [_MODULE, str(run.path), str(attempt)]} if trial_of(run) else {}


def look(folder: TrialFolder, run: Run, attempt: int) -> bool:
    """Look at the trial once, and ask the run to stop where its recipe is stopped; return whether it was asked.

    Runs of stopped recipes that wait in the queue are cancelled: their jobs end as soon as they start.
    """
    looks, trial = take_looks(folder), folder.read()
    for recipe, by in stopped_recipes(looks).items():
        cause = f"trial {folder.name}: recipe {recipe} cannot win any more (look {by.number}, at step {by.step})"
        for name in trial.recipes.get(recipe, ()):
            if trial.steps in steps_evaluated(folder.run(name)):  # it only has to save and end
                continue
            if name != run.name:
                cancel_waiting(folder.run(name), cause)
            else:
                ask_to_stop(run, attempt, "cancelled", cause)
                print(cause, flush=True)
                return True
    return False


def cancel_waiting(run: Run, cause: str) -> None:
    """Cancel a run that has no attempt yet, or whose last one was interrupted; one that has begun looks for itself."""
    if not run.config.is_file():  # it was removed, and its outcome would make its directory again
        return
    attempts = read_attempts(run)
    newest = attempts[-1].number if attempts else 0
    outcome = outcome_of(run, newest)
    waits = outcome is None if not attempts else outcome is not None and outcome.kind == "interrupted"
    if waits:
        cancel_outcome(run, newest, cause, "hpcrl trial")
        print(f"{run.name}, which waits in the queue: {cause}", flush=True)


def main(path: str, attempt: int, again: Callable[[], bool]) -> None:
    """Look until `again` returns False or the run was asked to stop; what cannot be read is looked at again.

    A look takes in all files of the trial, and only an evaluation can make one due. So a run looks after one of its own, after another
    run's look, once in two minutes, and at its end.
    """
    run = Run.open(path)
    folder, goes_on, asked = trial_of(run), True, False
    seen, next_at = (set[int](), 0), 0.0
    while folder and goes_on and not asked:
        goes_on = again()
        try:
            now = steps_evaluated(run), len(children(folder.looks))
            if goes_on and now == seen and time.monotonic() < next_at:
                continue
            asked = look(folder, run, attempt)
            seen, next_at = now, time.monotonic() + _EVERYTHING_S
        except (OSError, DataError, RunError) as error:
            print(f"no look: {error}", flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]), lambda: more(_POLL_S))
    except HpcrlError as error:
        sys.exit(f"{type(error).__name__}: {error}")
