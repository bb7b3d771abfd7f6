"""How a process that has something to save hears that it is to stop."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from types import FrameType

from hpcrl.run.layout import Run
from hpcrl.run.lease import LeaseWriter
from hpcrl.run.stop_request import stop_asked

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)
"""Slurm's two ways to announce the end; which of them comes, how often and in which order is up to the cluster."""

_LOOK_S = 1.0
_OTHERS_LOOK_S = 10.0  # not every rank of a large run asks the shared filesystem every second
_UNASKED_S = 30.0  # a stop file that another node wrote may show late
_ALONE_S = 15.0


class StopSignal:
    """Notes a stop request, by signal or by the run's stop file, instead of dying of it. Made as early as possible, in the main thread.

    A process that is inside a collective, or waits for others to come, never gets to what `seen` says. So a thread watches:

    - As long as nothing is at stake (imports, rendezvous, load, the first compile), the process leaves by itself with 0, having
      said "stopped" on its lease, when it had no chance to leave with the others for 15 s.
    - torchrun sends SIGTERM too, when another rank has failed. Nobody has asked the run to stop then, no stop file comes within
      30 s, and the process ends with 1.

    Attributes:
        seen: there is a request.
        since: time.monotonic() of its first sight; None before.
        at_stake: leaving now would lose training.
    """

    def __init__(self) -> None:
        self.seen, self.at_stake = False, False
        self.since: float | None = None
        self._run: Run | None = None
        self._signalled: float | None = None
        self._attempt, self._process, self._speaks = 0, "", False
        self._wakes, wakens = os.pipe()
        os.set_blocking(wakens, False)
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)
        # Python's own handlers wait for the main thread to come back from a collective; this does not
        signal.set_wakeup_fd(wakens, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, daemon=True).start()

    def follow(self, run: Run, attempt: int, process: str, *, speaks: bool) -> None:
        """Look at the stop file too, from now on.

        Args:
            process: name of the lease.
            speaks: this process writes that lease; one of several that share it does.
        """
        self._attempt, self._process, self._speaks = attempt, process, speaks
        self._run = run

    def hear(self) -> None:
        """There is a stop request, whoever told of it."""
        if self.since is None:
            self.since = time.monotonic()
        self.seen = True

    def ignore(self) -> None:
        """Hear nothing any more: all is done. At its very end Python gives signals back their default, which is death."""
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _note(self, _number: int = 0, _frame: FrameType | None = None) -> None:
        self._signalled = self._signalled or time.monotonic()
        self.hear()

    def _watch(self) -> None:
        looked = followed = 0.0
        while True:
            ready, _, _ = select.select([self._wakes], [], [], _LOOK_S)
            if ready and set(os.read(self._wakes, 4096)) & set(STOP_SIGNALS):
                self._note()
            now = time.monotonic()
            if self._run is None or now - looked < (_LOOK_S if self._speaks or self.seen else _OTHERS_LOOK_S):
                continue
            looked, followed = (
                now,
                followed or now,
            )  # before it followed a run it could not have known whether it was asked
            if stop_asked(self._run, self._attempt):
                self.hear()
                if not self.at_stake and now - max(self.since or now, followed) > _ALONE_S:
                    self._leave(self._run)
            elif self._signalled is not None and now - max(self._signalled, followed) > _UNASKED_S:
                os._exit(1)

    def _leave(self, run: Run) -> None:
        if self._speaks:
            LeaseWriter(run, self._process, self._attempt).say("stopped")
        os._exit(0)
