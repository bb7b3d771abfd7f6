"""Heartbeats within a node: each process of a run shows its agent that it makes progress, and writes its stacks at SIGUSR1.

A heartbeat is a small file in the node's own temporary directory, written without a system call that could wait for another node. The agent takes
from it the process's id, and notices a hang (hpcrl/launch/agent/watchdog.py).
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from hpcrl.rundir.commit import make_directory
from hpcrl.rundir.layout import Run

DIRECTORY = "HPCRL_HEARTBEAT"
_SIZE = 64


class Heartbeat:
    """The heartbeat of this process. SIGUSR1 makes it append the stacks of all its threads to logs/<attempt>/stacks/<process>.txt.

    Without an agent, which names the directory in HPCRL_HEARTBEAT, nothing is written.
    """

    def __init__(self, run: Run, attempt: int, process: str) -> None:
        self._beats, self._file, self._phase = 0, -1, "load"
        stacks = run.stacks(attempt, process)
        make_directory(stacks.parent)
        self._stacks = stacks.open("a")  # stays open: the handler runs where nothing can be opened any more
        faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True)
        if directory := os.environ.get(DIRECTORY):
            self._file = os.open(Path(directory) / process, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            self.beat()

    def beat(self, phase: str | None = None) -> None:
        """Show that this process makes progress, and with what: load, wait, step, save, serve; None: with the same as before."""
        self._phase = phase or self._phase
        self._beats += 1
        if self._file >= 0:
            os.pwrite(self._file, f"{os.getpid()} {self._phase} {self._beats}".ljust(_SIZE).encode(), 0)


@dataclass(frozen=True)
class LastBeat:
    """The heartbeat of a process as its agent reads it.

    Attributes:
        beats: how many there were; it rises as long as the process makes progress.
    """

    process: str
    pid: int
    phase: str
    beats: int


def read_heartbeats(directory: Path) -> list[LastBeat]:
    """Return the heartbeats of a node, by name of the process."""
    found = []
    for path in sorted(directory.iterdir()):
        words = path.read_text().split()
        if len(words) == 3:  # not one that is being made
            found.append(LastBeat(path.name, int(words[0]), words[1], int(words[2])))
    return found


class SuspendAwareClock:
    """Seconds since its beginning, without those during which this process was stopped.

    A process cannot know for how long it was stopped, so time between two calls of `now` counts up to a bound.

    Args:
        longest_s: the bound; above what passes between two calls while the process runs.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s, self._last, self._now = longest_s, time.monotonic(), 0.0

    def now(self) -> float:
        looked = time.monotonic()
        self._now += min(looked - self._last, self._longest_s)
        self._last = looked
        return self._now
