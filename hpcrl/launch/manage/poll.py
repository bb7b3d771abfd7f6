"""Waits for runs: reads their files often, and asks the scheduler seldom, since all users share it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from hpcrl.errors import RunError
from hpcrl.launch.manage.state import RunState
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import Outcome, outcome_of, read_attempts

LOOK_S = 0.5
"""How often a caller may call `states`."""
_ASK_S = 15.0
_LEAVING_S = 2.0


class RunPoller:
    """The states of runs, again and again.

    Args:
        ask: `known_states` or `states_of`; called every 15 s at most, at once when a newest attempt gets an outcome, and then
            every 2 s until its job has left. Local runs cost nothing to ask for.
    """

    def __init__(self, runs: Sequence[Run], ask: Callable[[Sequence[Run]], list[RunState]]) -> None:
        self._runs, self._ask = runs, ask
        self._states: list[RunState] = []
        self._asked, self._known = 0.0, self._outcomes()

    def states(self) -> list[RunState]:
        """Return the states, in the order of the runs, which may be 15 s old."""
        outcomes = self._outcomes()
        pause = min(map(_pause, self._states, outcomes), default=0.0)
        if outcomes != self._known or time.monotonic() - self._asked >= pause:
            self._states = self._ask(self._runs)
            self._asked, self._known = time.monotonic(), outcomes
        return self._states

    def over(self) -> bool:
        """Return whether the runs are over.

        Raises:
            SubmitError, RunError: `ask` did, or a damaged file hides whether a run is over.
        """
        states = self.states()
        for state in states:
            if state.damaged:
                raise RunError(state.complaint)
        return all(state.over for state in states)

    def _outcomes(self) -> list[Outcome | None]:
        return [_outcome(run) for run in self._runs]


def _outcome(run: Run) -> Outcome | None:
    with suppress(RunError):  # a file is damaged, which the state tells
        attempts = read_attempts(run)
        return outcome_of(run, attempts[-1].number if attempts else 0)
    return None


def _pause(state: RunState, outcome: Outcome | None) -> float:
    if state.submission.get("executor") == "local":
        return 0.0
    leaves = not state.over and (state.kind == "ending" or (outcome is not None and outcome.final))
    return _LEAVING_S if leaves else _ASK_S
