"""A clock that stands still while its process does: a suspended job must not find that all the others have fallen silent."""

from __future__ import annotations

import time


class AwakeClock:
    """Seconds since its beginning, without those during which this process was stopped.

    Nobody tells a process for how long it was stopped, so time between two looks at the clock counts up to a bound.

    Args:
        longest_s: the bound; above what passes between two looks while the process runs.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s, self._looked, self._now = longest_s, time.monotonic(), 0.0

    def now(self) -> float:
        looked = time.monotonic()
        self._now += min(looked - self._looked, self._longest_s)
        self._looked = looked
        return self._now
