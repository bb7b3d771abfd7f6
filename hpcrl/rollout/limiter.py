"""Limit of the groups in flight of an engine: fewer when its key-value cache is full, more again when there is space. Pure logic.

An engine whose cache is full preempts requests, whose prefixes it computes again later, or lets them wait, while another replica
might have room. How much a group needs is known only when its samples have ended, so the limit follows what the engine reports:
down by a fifth when it is pressed, up by one group at a time when it has space (additive increase, multiplicative decrease).
"""

from __future__ import annotations

from dataclasses import dataclass

_FULL = 0.95
_SPARE = 0.85
_LESS = 0.8


@dataclass(frozen=True)
class Load:
    """What an engine reports about itself.

    Attributes:
        usage: share of the key-value cache that running requests hold.
        waiting: requests that wait for a place.
        preemptions: requests that were preempted since the engine's start, those whose caches an update of the weights dropped included.
        updates: of the weights since then.
        dropped: requests whose caches the last of them dropped.
    """

    usage: float
    waiting: float
    preemptions: float
    updates: int = 0
    dropped: int = 0


class ConcurrencyLimiter:
    """The limit of one engine.

    Args:
        most: groups that it is never higher than.
        waves: groups begin when all that began before have ended, and not as soon as there is room.

    Attributes:
        limit: groups in flight at most; at least 1.
    """

    def __init__(self, most: int, *, waves: bool = False) -> None:
        self._most, self._waves = most, waves
        self.limit = most
        self._preemptions: float | None = None
        self._updates, self._by_update = 0, 0.0

    def room(self, running: int) -> int:
        """Return how many more groups may begin while so many are in flight."""
        return 0 if self._waves and running else max(0, self.limit - running)

    def update(self, load: Load, running: int) -> bool:
        """Adapt the limit to what the engine reports, about once a second; return whether there is more room than before.

        Args:
            running: groups in flight.
        """
        preempted = self._preempted(load)
        if preempted or (load.waiting > 0 and load.usage > _FULL):
            if running <= self.limit:  # else groups in flight have yet to come down to a limit that was lowered before
                self.limit = max(1, int(running * _LESS))
            return False
        grows = running >= self.limit and self.limit < self._most and load.usage < _SPARE and not load.waiting
        self.limit += grows
        return grows

    def _preempted(self, load: Load) -> bool:
        """Return whether requests were preempted since the last look that no update preempted.

        vLLM counts a request once it has gone on, which may be long after the update.
        """
        if load.updates != self._updates:
            self._updates, self._by_update = load.updates, float(load.dropped)
        more = 0.0 if self._preemptions is None else load.preemptions - self._preemptions
        self._preemptions = load.preemptions
        by_update = min(more, self._by_update)
        self._by_update -= by_update
        return more > by_update
