"""Metrics of a worker's time with one version."""

from __future__ import annotations

import time
from collections.abc import Mapping

from hpcrl.runtime.memory import GIB, resident_with_children


class RolloutMetrics:
    """Measures from `start` to the next `start`.

    Attributes:
        tokens: generated since the start; the owner adds to it.
        kept: those that other workers had generated of groups which this one finished; the owner adds to it too.
        written: bytes of the files of finished groups; likewise.
    """

    def __init__(self) -> None:
        self._is_busy = False
        self.start({})

    def start(self, known: Mapping[str, float]) -> None:
        """Begin the next version.

        Args:
            known: metrics of the change to this version, reported with it.
        """
        self._known = dict(known)
        self._since = time.monotonic()
        self._busy = 0.0
        self._idle = 0.0
        self.tokens = self.kept = self.written = 0

    def add(self, known: Mapping[str, float]) -> None:
        """Report further metrics of the change to this version."""
        self._known |= known

    def set_busy(self, busy: bool) -> None:
        """Whether there is work from here on."""
        self._settle()
        self._is_busy = busy

    def values(self) -> dict[str, float]:
        """Return the metrics so far; tokens per second are per second with work, memory is that of this process and its engine now."""
        self._settle()
        share = self._idle / max(self._idle + self._busy, 1e-6)
        values = {**self._known, "generate/idle_seconds": self._idle, "generate/idle_ratio": share}
        if self.tokens:
            values["generate/tokens_per_second"] = self.tokens / max(self._busy, 1e-6)
        if self.kept:
            values["generate/tokens_kept"] = float(self.kept)
        values["throughput/samples_gib"] = self.written / GIB
        values["memory/host_gib"] = resident_with_children() / GIB
        return values

    def _settle(self) -> None:
        now = time.monotonic()
        if self._is_busy:
            self._busy += now - self._since
        else:
            self._idle += now - self._since
        self._since = now
