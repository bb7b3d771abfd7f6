"""Leases: each process of a run tells in one small file what it is doing.

`hpcrl status` and `--follow` read them, so a run can be watched from any node without reaching its servers.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from hpcrl.run.commit import read_json, write_json
from hpcrl.run.fault import fault
from hpcrl.run.layout import Run
from hpcrl.run.pulse import Pulse

CONTROLLER = "controller"
RENEW_S = 5.0
FAILED = "failed"
GIVEN_UP = "given up"
"""What the lease of a replica that failed says before the reason, and once its agent will not start it again."""

_LEFT = ("finished", "stopped")


@dataclass(frozen=True)
class Lease:
    """What a process last said.

    Attributes:
        process: "controller", "trainer" or "rollout-<replica>".
        state: a few words for people: "starting engine", "step 12/40".
        facts: numbers behind the words (step, version, seconds per step).
        renewed: Unix time at the writer's clock.
    """

    process: str
    attempt: int
    state: str
    facts: dict[str, Any] = field(default_factory=dict)
    host: str = ""
    pid: int = 0
    renewed: float = 0.0


class LeaseWriter:
    """Writes the lease of this process; a state that has not changed is written at most every `RENEW_S` seconds.

    Where the filesystem refuses, the process goes on unheard: a lease is not worth an attempt.

    Args:
        pulse: beats whenever something is said.
    """

    def __init__(self, run: Run, process: str, attempt: int, pulse: Pulse | None = None) -> None:
        self._pulse = pulse
        self._path, self._process, self._attempt = run.lease(process), process, attempt
        self._said: tuple[str, dict[str, Any]] | None = None
        self._renewed = 0.0
        self._refused = False

    def say(self, state: str, **facts: Any) -> None:
        if self._pulse:
            self._pulse.beat()
        now = time.time()
        if (state, facts) == self._said and now - self._renewed < RENEW_S:
            return
        self._said, self._renewed = (state, facts), now
        try:
            self._write(Lease(self._process, self._attempt, state, facts, socket.gethostname(), os.getpid(), now))
        except OSError as error:
            if not self._refused:
                print(
                    f"{self._path} could not be written: {error.strerror}; `hpcrl status` may not hear of this process"
                )
            self._refused = True

    def _write(self, lease: Lease) -> None:
        if (written := read_json(self._path)) and written["attempt"] > self._attempt:
            return  # this process was thought dead, and another has its place
        fault("lease")
        write_json(self._path, asdict(lease))


def read_lease(run: Run, process: str, attempt: int) -> Lease | None:
    """Return the lease of one process in one attempt, or None where it has said nothing yet."""
    value = read_json(run.lease(process))
    return Lease(**value) if value and value["attempt"] == attempt else None


def read_leases(run: Run, attempt: int | None = None) -> list[Lease]:
    """Return the leases of a run, of one attempt only where `attempt` is given, ordered by process name."""
    leases = []
    for path in sorted(run.endpoints.glob("*.json")) if run.endpoints.is_dir() else []:
        value = read_json(path)
        if value is not None and "process" in value:
            leases.append(Lease(**value))
    return [lease for lease in leases if attempt is None or lease.attempt == attempt]


def trainer_left(run: Run, attempt: int) -> bool:
    """Return whether the trainer has said its last: everything that it trained is saved."""
    lease = read_lease(run, "trainer", attempt)
    return lease is not None and lease.state in _LEFT
