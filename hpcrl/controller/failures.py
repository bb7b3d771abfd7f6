"""When environments fail so often that a run should not go on."""

from __future__ import annotations

from collections import deque

from hpcrl.errors import UserCodeError
from hpcrl.types import GroupMeta


class Failures:
    """Looks at as many of the newest groups as a step has.

    Args:
        ratio: `environment.max_failed_ratio`.
        groups: of a step.
    """

    def __init__(self, ratio: float, groups: int) -> None:
        self._ratio = ratio
        self._newest: deque[GroupMeta] = deque(maxlen=groups)

    def add(self, group: GroupMeta) -> UserCodeError | None:
        """Return why the run cannot go on after this group, or None."""
        self._newest.append(group)
        failures = [failure for one in self._newest for failure in one.failures]
        samples = sum(len(one.rewards) for one in self._newest)
        if len(self._newest) < (self._newest.maxlen or 0) or len(failures) <= self._ratio * samples:
            return None
        return UserCodeError(
            f"environments failed in {len(failures)} of the newest {samples} samples, more than environment.max_failed_ratio = "
            f"{self._ratio:g}; the last: {failures[-1]}"
        )
