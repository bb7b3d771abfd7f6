"""Detects hangs: processes of this node without progress, and nodes that no longer answer."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from hpcrl.config.sections.slurm import PatienceConfig
from hpcrl.rundir.layout import Run
from hpcrl.runtime.heartbeat import LastBeat, SuspendAwareClock, read_heartbeats
from hpcrl.runtime.process_status import CONTROLLER, ENDED, StatusWriter, read_process_status

_LONGEST_PAUSE_S = 2.0
_PROBE_S = 1.0
_NO_ANSWER_S = 6.0
_START_S = 90.0
_SILENT_S = 60.0  # network filesystems may show a file that has changed as late as that


@dataclass(frozen=True)
class Stall:
    """A process that makes no progress.

    Attributes:
        seconds: for how long.
    """

    process: str
    phase: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.process} has made no progress in phase {self.phase} for {self.seconds:.0f} s"


class Watchdog:
    """Watches the heartbeats of this node's processes.

    Args:
        heartbeats: directory of the heartbeats.
    """

    def __init__(self, heartbeats: Path, patience: PatienceConfig) -> None:
        self._heartbeats, self._clock = heartbeats, SuspendAwareClock(_LONGEST_PAUSE_S)
        self._limits = {"load": patience.load_seconds, "save": patience.save_seconds}
        self._step = patience.step_seconds
        self._seen: dict[str, tuple[LastBeat, float]] = {}

    def look(self, expected: Sequence[str]) -> list[Stall]:
        """Return the expected processes that make no progress; one that has no heartbeat yet is loading."""
        now, beats = self._clock.now(), {beat.process: beat for beat in read_heartbeats(self._heartbeats)}
        stalls = []
        for process in expected:
            beat = beats.get(process, LastBeat(process, 0, "load", 0))
            seen, since = self._seen.get(process, (None, now))
            if seen != beat:
                since = now
            self._seen[process] = beat, since
            limit = self._limits.get(beat.phase, self._step)
            if 0 < limit < now - since:
                stalls.append(Stall(process, beat.phase, now - since))
        return stalls

    def forget(self, process: str) -> None:
        """Forget the state of a process that starts again under this name."""
        self._seen.pop(process, None)
        (self._heartbeats / process).unlink(missing_ok=True)

    def signal(self, number: signal.Signals, prefix: str = "") -> None:
        """Send a signal to the processes that have a heartbeat, those alone whose name begins with `prefix`."""
        for beat in read_heartbeats(self._heartbeats):
            if beat.process.startswith(prefix):
                with suppress(ProcessLookupError, PermissionError):  # its number may be another's by now
                    os.kill(beat.pid, number)


class Neighbours:
    """Watches the heartbeats of the other nodes.

    Node 0 reads the process statuses of the other agents: each must appear, and those of needed nodes must be renewed. The others connect to
    the controller's port, which is on node 0 and does not outlive its agent. Where nothing can be reached at all it may be the network, and the
    process status of node 0 decides.

    Args:
        needed: nodes without which the run cannot go on.
        hosts: of all nodes that Slurm starts together.
        process: the name of this agent's process status; None: agent-<index>.
    """

    def __init__(
        self,
        run: Run,
        attempt: int,
        index: int,
        needed: Sequence[int],
        hosts: Sequence[str],
        process: str | None = None,
    ) -> None:
        self._run, self._attempt, self._index, self._hosts = run, attempt, index, hosts
        self._others = {f"agent-{other}": hosts[other] for other in range(1, len(hosts))} if index == 0 else {}
        self._needed = {f"agent-{other}" for other in needed}
        self._status = StatusWriter(run, process or f"agent-{index}", attempt)
        self._clock, self._probed, self._answered = SuspendAwareClock(_LONGEST_PAUSE_S), 0.0, None
        self._seen_statuses: dict[str, tuple[float, float]] = {}  # renewed by the other's clock, seen by ours

    def lost(self) -> str | None:
        """Return the error of another node, or None. To be asked several times per second."""
        self._status.write("watching")
        now = self._clock.now()
        if now - self._probed < _PROBE_S:
            return None
        self._probed = now
        for process in self._others or ("agent-0",):
            if process_status := read_process_status(self._run, process, self._attempt):
                renewed, since = self._seen_statuses.get(process, (0.0, now))
                self._seen_statuses[process] = (
                    process_status.renewed,
                    now if process_status.renewed != renewed else since,
                )
        return self._silent(now) if self._index == 0 else self._unreachable(now)

    def leave(self) -> None:
        """Record that this agent ends by itself."""
        self._status.write(ENDED)

    def _silent(self, now: float) -> str | None:
        for process, host in self._others.items():
            if process not in self._seen_statuses and now > _START_S:
                return (
                    f"nothing was heard of {host} for {now:.0f} s: does it see {self._run.path}? slurm.root must lie on a filesystem "
                    "that all nodes share"
                )
            silence = now - self._seen_statuses[process][1] if process in self._seen_statuses else 0.0
            if process in self._needed and silence > _SILENT_S:
                return f"nothing was heard of {host}, a node that the run needs, for {silence:.0f} s"
        return None

    def _unreachable(self, now: float) -> str | None:
        process_status = read_process_status(self._run, CONTROLLER, self._attempt)
        url = process_status.facts.get("url") if process_status else None
        if process_status and process_status.state == "finished":
            return None
        refused = None
        if url:
            address = urlsplit(url)
            assert address.hostname
            assert address.port
            try:
                socket.create_connection((address.hostname, address.port), timeout=_PROBE_S).close()
            except ConnectionRefusedError as error:
                refused = error
            except OSError:
                pass
            else:
                self._answered = now
        heard = max(self._seen_statuses.get("agent-0", (0.0, 0.0))[1], self._answered or 0.0)
        # if the first agent lives, it reports itself why its controller ended
        if refused and self._answered is not None and now - heard > _NO_ANSWER_S:
            return f"{self._hosts[0]}, the first node, does not answer: {refused}"
        if now - heard > _SILENT_S:
            return f"nothing was heard of {self._hosts[0]}, the first node, for {now - heard:.0f} s"
        return None
