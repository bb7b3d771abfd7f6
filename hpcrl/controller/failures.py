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
        self._ratio, self._groups = ratio, groups
        self._newest = deque[tuple[int, int]]()  # samples and failures of each group
        self._samples = self._failed = 0
        self._said = ""

    def add(self, group: GroupMeta) -> UserCodeError | None:
        """Return why the run cannot go on after this group, or None."""
        self._count(len(group.rewards), len(group.failures))
        self._said = group.failures[-1] if group.failures else self._said
        self._newest.append((len(group.rewards), len(group.failures)))
        if len(self._newest) > self._groups:
            samples, failed = self._newest.popleft()
            self._count(-samples, -failed)
        if len(self._newest) < self._groups or self._failed <= self._ratio * self._samples:
            return None
        return UserCodeError(
            f"environments failed in {self._failed} of the newest {self._samples} samples, more than environment.max_failed_ratio = "
            f"{self._ratio:g}; the last: {self._said}"
        )

    def _count(self, samples: int, failed: int) -> None:
        self._samples += samples
        self._failed += failed
