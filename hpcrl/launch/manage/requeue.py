"""Asks a running run to save and to go back into the queue."""

from __future__ import annotations

import tomli

from hpcrl.errors import RunError
from hpcrl.launch.manage.registry import states_of
from hpcrl.rundir.layout import Run
from hpcrl.runtime.signals import ask_to_stop


def requeue(run: Run) -> None:
    """Ask a running run to save and to go back into the queue.

    Raises:
        RunError: it does not run, not on Slurm, or would restart from step 0.
    """
    state = states_of([run])[0]
    if state.submission.get("executor") == "local":
        raise RunError(
            f"{run.name} runs on this machine, without a queue: `hpcrl cancel` and `hpcrl resume` do the same"
        )
    if state.over:
        raise RunError(
            f"{run.name} is not running: {state.kind} ({state.detail}); `hpcrl resume {run.name}` continues it"
        )
    if state.job.name == "PENDING":
        raise RunError(f"{run.name} waits in the queue already: {state.detail}")
    if state.attempt == 0 or state.kind == "starting" or state.outcome is not None:
        raise RunError(f"{run.name} is {state.kind}; try again in a moment")
    if tomli.loads(run.config.read_text())["trainer"]["resume_mode"] == "none":
        raise RunError(
            f"{run.name} would lose all progress: trainer.resume_mode is none, so no attempt continues another; `hpcrl cancel {run.name}` "
            "ends it"
        )
    ask_to_stop(run, state.attempt, "interrupted")
