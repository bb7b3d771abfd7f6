"""Reward services that the run itself has started."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import count

from hpcrl.envs.rewards.remote import Endpoints
from hpcrl.rollout.own_services import OwnRoute, OwnService
from hpcrl.rundir.layout import Run
from hpcrl.runtime.token import read_token

_LOOK_S = 1.0


class RewardServices:
    """The reward services of one attempt, called in turns; an unavailable one only where all are.

    Args:
        number: how many there are; they are named reward-0 and so on.
        seconds: environment.timeout_seconds.
    """

    def __init__(self, run: Run, attempt: int, number: int, seconds: float) -> None:
        token = read_token(run)
        self._peers = [OwnService(run, attempt, f"reward-{place}", token) for place in range(number)]
        self._turn, self._lock = count(), threading.Lock()
        self._endpoints = [
            Endpoints.of(
                (f"{peer.name} of the run (enqueue)", f"{peer.name} of the run (fetch)"),
                (OwnRoute(peer, "/enqueue"), OwnRoute(peer, "/fetch")),
                seconds,
            )
            for peer in self._peers
        ]

    def choose(self) -> Endpoints:
        """Return the service that gets the next request."""
        with self._lock:
            first = next(self._turn)
        order = [(first + place) % len(self._peers) for place in range(len(self._peers))]
        there = [place for place in order if self._peers[place].url() is not None]
        return self._endpoints[(there or order)[0]]

    def wait(self, tell: Callable[[], None]) -> None:
        """Return when all services are ready; their supervisor ends the attempt where they cannot be.

        Args:
            tell: called several times per minute meanwhile.
        """
        while any(peer.url() is None for peer in self._peers):
            tell()
            time.sleep(_LOOK_S)
