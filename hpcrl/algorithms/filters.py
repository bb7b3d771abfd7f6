"""Which groups are worth training."""

from __future__ import annotations

from collections.abc import Sequence


def varied(rewards: Sequence[float]) -> bool:
    """Return whether a group's rewards differ, or it has no second sample to differ from.

    Otherwise every sample is as good as its group, so that estimators which compare within it find nothing to learn.
    """
    return len(rewards) == 1 or min(rewards) < max(rewards)
