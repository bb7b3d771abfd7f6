"""Waiting for a run: its files are looked at often, the scheduler is asked seldom, for it answers everybody's questions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from hpcrl.errors import RunError
from hpcrl.launch.manage.state import RunState
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import Outcome, outcome_of, read_attempts

LOOK_S = 0.5
"""How often a caller may call `state`."""
_ASK_S = 15.0
_LEAVING_S = 2.0


class RunPoller:
    """The state of a run, again and again.

    Args:
        ask: `known_states` or `states_of`; called every 15 s at most, at once when the newest attempt gets an outcome, and then
            every 2 s until its job has left. A local run costs nothing to ask for.
    """

    def __init__(self, run: Run, ask: Callable[[Sequence[Run]], list[RunState]]) -> None:
        self._run, self._ask = run, ask
        self._state: RunState | None = None
        self._asked, self._known = 0.0, self._outcome()

    def state(self) -> RunState:
        """Return the state, which may be 15 s old.

        Raises:
            SubmitError, RunError: `ask` did.
        """
        outcome, state = self._outcome(), self._state
        if state is None or outcome != self._known or time.monotonic() - self._asked >= _pause(state, outcome):
            state = self._state = self._ask([self._run])[0]
            self._asked, self._known = time.monotonic(), outcome
        return state

    def over(self) -> bool:
        """Return whether the run is over.

        Raises:
            SubmitError, RunError: `ask` did, or that cannot be told, because a file is damaged.
        """
        state = self.state()
        if state.damaged:
            raise RunError(state.complaint)
        return state.over

    def _outcome(self) -> Outcome | None:
        with suppress(RunError):  # a file is damaged, which the state tells
            attempts = read_attempts(self._run)
            return outcome_of(self._run, attempts[-1].number if attempts else 0)
        return None


def _pause(state: RunState, outcome: Outcome | None) -> float:
    if state.submission.get("executor") == "local":
        return 0.0
    leaves = state.kind == "ending" or (outcome is not None and outcome.final)
    return _LEAVING_S if leaves else _ASK_S
