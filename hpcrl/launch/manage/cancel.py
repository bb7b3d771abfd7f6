"""Cancels a run, or asks a running one to save and to go back into the queue."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import tomli

from hpcrl.config import Config
from hpcrl.errors import ConfigError, RunError, SubmitError
from hpcrl.launch.manage.poll import LOOK_S, RunPoller
from hpcrl.launch.manage.registry import RunState, states_of
from hpcrl.launch.requeue.elastic import cancel_pools
from hpcrl.launch.requeue.evaluation import cancel_evaluation, evaluation_job
from hpcrl.launch.requeue.requests import cancel_others
from hpcrl.launch.scheduler import cancel_slurm
from hpcrl.rundir.commit import read_json
from hpcrl.rundir.evaluations import begun_evaluations
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import cancel_outcome
from hpcrl.runtime.signals import ask_to_stop, stop_asked

SAVING_S = 150.0
"""For how long `hpcrl cancel` awaits the end of a run that saves."""
_LEAVING_S = 40.0  # Slurm kills what does not end 30 s after SIGTERM, unless the site says otherwise


def cancel(run: Run, patience_s: float, waiting: Callable[[RunState], None] = lambda _: None) -> RunState:
    """Ask a run to save and stop, and wait for it; a run that has nothing to save is taken away at once.

    Args:
        waiting: called with the state of a run that saves, before its end is awaited.
        patience_s: for how long its end is awaited: what saves then goes on saving, and ends by itself. 0: take the job away now.

    A run that waits in the queue, also after a preemption, is taken out of it; one that is held for a person is only marked. A job that
    would upload what it has left goes too where it has left nothing, and its evaluation job in any case. Of a run that is over, the
    evaluation job alone is cancelled, while versions wait for it.
    """
    state = _cancel(run, patience_s, waiting)
    if state.over and state.kind == "cancelled":
        _take_upload_away(run)
        cancel_evaluation(run)
    return state


def _cancel(run: Run, patience_s: float, waiting: Callable[[RunState], None]) -> RunState:
    state = states_of([run])[0]
    if state.over and state.kind == "held":
        cancel_outcome(run, state.attempt)
        return states_of([run])[0]
    if state.over and state.kind != "cancelled" and evaluation_job(run) and begun_evaluations(run):
        cancel_evaluation(run)
        return state
    if state.over:
        raise RunError(f"{run.name} is not running: {state.kind} ({state.detail})")
    if state.at_work and patience_s > 0:
        ask_to_stop(run, state.attempt, "cancelled")
        waiting(state)
        return _await_end(run, patience_s)
    if state.outcome is None or not state.outcome.final:
        cancel_outcome(run, state.attempt)
    _take_away(state)
    return _await_end(run, _LEAVING_S)


def _await_end(run: Run, patience_s: float) -> RunState:
    poller, deadline = RunPoller([run], states_of), time.monotonic() + patience_s
    while not (state := poller.states()[0]).over:
        if time.monotonic() > deadline:
            return states_of([run])[0]
        time.sleep(LOOK_S)
    return state


def _take_upload_away(run: Run) -> None:
    """Cancel the run's waiting upload job, where the run has left nothing to upload."""
    job = (read_json(run.submission) or {}).get("upload")
    if job is None:
        return
    from hpcrl.upload.send import stores_of, wanted  # with the clients of stores, which most runs do not need

    with suppress(
        ConfigError, SubmitError
    ):  # of another version of hpcrl; or the job is over, and Slurm has forgotten it
        upload = Config.from_toml([run.config]).trainer.upload
        if not any(wanted(run, store, upload, done=False) for store in stores_of(upload)):
            cancel_slurm(job)


def _take_away(state: RunState) -> None:
    cancel_pools(state.run)
    job = state.submission["job_id"]
    if state.submission["executor"] == "slurm":
        cancel_slurm(job)
        cancel_others(state.run, job)
    # Agents end their processes when they see the outcome; the executor's process ends with its agents.
    elif state.job.active and _await_end(state.run, _LEAVING_S).job.active:
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            for child in (
                Path(f"/proc/{job}/task/{job}/children").read_text().split()
            ):  # the job's process is a shell above it
                os.kill(int(child), signal.SIGTERM)


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
    if stop_asked(run, state.attempt) == "cancelled":
        raise RunError(f"{run.name} is being cancelled; `hpcrl resume {run.name}` continues it once it has ended")
    ask_to_stop(run, state.attempt, "interrupted")
