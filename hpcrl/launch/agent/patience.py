"""Tolerates errors of the filesystem of a run for a while: a file server that restarts must not cost the attempt."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hpcrl.errors import RunError
from hpcrl.rundir.layout import Run
from hpcrl.runtime.heartbeat import SuspendAwareClock

_TROUBLE_S = 60.0


class FilesystemPatience:
    """Patience of one agent with the directory of its run."""

    def __init__(self, run: Run) -> None:
        self._run, self._clock, self._since = run, SuspendAwareClock(_TROUBLE_S), None

    @contextmanager
    def tolerating(self) -> Iterator[None]:
        """Print an OSError of the block instead of raising it. Raises RunError where each block of the last minute had one."""
        try:
            yield
        except OSError as error:
            now = self._clock.now()
            self._since = now if self._since is None else self._since
            if now - self._since > _TROUBLE_S:
                raise RunError(f"{self._run.path} cannot be used since {_TROUBLE_S:.0f} s: {error}") from error
            print(f"waiting for the filesystem: {error}", flush=True)
        else:
            self._since = None
