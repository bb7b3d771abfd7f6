"""Cancelling a run."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from hpcrl.errors import RunError
from hpcrl.launch.registry import RunState, states_of
from hpcrl.launch.scheduler import cancel_slurm
from hpcrl.run.commit import write_json
from hpcrl.run.layout import Run
from hpcrl.run.ledger import cancel_outcome

_POLL_S = 0.5


def cancel(run: Run, patience_s: float) -> RunState:
    """Ask a run to save and stop, and wait for it; a run that has nothing to save is taken away at once.

    Args:
        patience_s: for how long its end is awaited: what saves then goes on saving, and ends by itself. 0: take the job away now.

    Raises:
        RunError: the run is over already.
    """
    state = states_of([run])[0]
    if state.over:
        raise RunError(f"{run.name} is not running: {state.word} ({state.detail})")
    if state.word in ("running", "saving") and patience_s > 0:
        write_json(run.stop, {"attempt": state.attempt, "reason": "cancelled"})
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            state = states_of([run])[0]
            if state.over:
                return state
            time.sleep(_POLL_S)
        return state
    if state.outcome is None or not state.outcome.final:
        cancel_outcome(run, state.attempt)
    _take_away(state)
    return states_of([run])[0]


def _take_away(state: RunState) -> None:
    job = state.submission["job_id"]
    if state.submission["executor"] == "slurm":
        cancel_slurm(job)
    elif state.job.active:
        # Agents end their processes when they see the outcome; the executor's process ends with its agents.
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and states_of([state.run])[0].job.active:
            time.sleep(_POLL_S)
        if states_of([state.run])[0].job.active:
            for child in (
                Path(f"/proc/{job}/task/{job}/children").read_text().split()
            ):  # the job's process is a shell above it
                os.kill(int(child), signal.SIGTERM)
