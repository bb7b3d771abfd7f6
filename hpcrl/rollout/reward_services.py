"""Reward services that the run itself has started: their addresses, and proof of their identity."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from itertools import count

from hpcrl.envs.rewards.remote import Endpoints
from hpcrl.rundir.layout import Run
from hpcrl.runtime.process_status import SERVING, read_process_status
from hpcrl.runtime.token import NONCE, AttemptKey, Sender, of_process, read_token

_LOOK_S = 1.0


class RewardServices:
    """The reward services of one attempt, called in turns; an unavailable one only where all are.

    Args:
        number: how many there are; they are named reward-0 and so on.
        seconds: environment.timeout_seconds.
    """

    def __init__(self, run: Run, attempt: int, number: int, seconds: float) -> None:
        token = read_token(run)
        self._peers = [_Process(run, attempt, f"reward-{place}", token) for place in range(number)]
        self._turn, self._lock = count(), threading.Lock()
        self._endpoints = [
            Endpoints.of(
                (f"{peer.name} of the run (enqueue)", f"{peer.name} of the run (fetch)"),
                (_Route(peer, "/enqueue"), _Route(peer, "/fetch")),
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


class _Process:
    """One service, whose address changes when it is restarted."""

    def __init__(self, run: Run, attempt: int, name: str, token: str) -> None:
        self.name, self._run, self._attempt = name, run, attempt
        self.sender = Sender(AttemptKey.of(token, of_process(run.name, name), attempt))
        self._seen: tuple[float, str | None] = float("-inf"), None
        self._lock = threading.Lock()

    def url(self) -> str | None:
        """Return the address, as it was a second ago at most; None: it does not serve."""
        with self._lock:
            looked, url = self._seen
            if time.monotonic() - looked > _LOOK_S:
                status = read_process_status(self._run, self.name, self._attempt)
                url = status.facts.get("url") if status and status.state == SERVING else None
                self._seen = time.monotonic(), url
            return url


class _Route:
    """A route of a service, as whom requests are sent to (hpcrl/envs/tools/http.py)."""

    def __init__(self, process: _Process, path: str) -> None:
        self._process, self._path = process, path

    def address(self) -> str | None:
        url = self._process.url()
        return None if url is None else f"{url}{self._path}"

    def headers(self, path: str, body: bytes) -> dict[str, str]:
        return self._process.sender.headers(path, body)

    def is_answer(self, sent: Mapping[str, str], status: int, body: bytes, given: Mapping[str, str]) -> bool:
        return self._process.sender.is_answer(sent[NONCE], status, body, given)
