"""How often a replica that fails is started again."""

from __future__ import annotations

import time

from hpcrl.errors import ConfigError, DataError, UserCodeError

_WAIT_S, _LONGEST_WAIT_S = 5.0, 60.0
_RECOVERED_S = 1800.0

# What every other replica would say, too: the run itself is wrong.
_OF_THE_RUN = (ConfigError.exit_code, DataError.exit_code, UserCodeError.exit_code)


def concerns_the_run(status: int) -> bool:
    """Return whether the exit status of a rollout process tells of an error that no other replica would escape."""
    return status in _OF_THE_RUN


class Restarts:
    """The restarts of one replica in one attempt: the first at once, each further one after twice the time, up to a minute.

    Args:
        budget: restarts until it is given up; one that has worked for half an hour begins anew.
    """

    def __init__(self, budget: int) -> None:
        self._budget, self.used = budget, 0
        self._started = time.monotonic()
        self.due: float | None = None

    @property
    def given_up(self) -> bool:
        return self.used > self._budget

    def ended(self) -> None:
        """The replica has failed: plan the next start, unless that was the last one."""
        if time.monotonic() - self._started > _RECOVERED_S:
            self.used = 0
        self.used += 1
        if not self.given_up:
            wait = 0.0 if self.used == 1 else min(_LONGEST_WAIT_S, _WAIT_S * 2 ** (self.used - 2))
            self.due = time.monotonic() + wait

    def started(self) -> None:
        self._started, self.due = time.monotonic(), None
