"""Servers that the run itself has started: their addresses, which change with a restart, and proof of their identity."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from hpcrl.envs.tools.http import GivenUp
from hpcrl.envs.tools.sandboxes import Sandboxes
from hpcrl.rundir.layout import Run
from hpcrl.rundir.process_names import sandbox_name
from hpcrl.runtime.process_status import GIVEN_UP, SERVING, ProcessStatus, read_process_status
from hpcrl.runtime.token import NONCE, AttemptKey, Sender, of_process, read_token

_LOOK_S = 1.0


def sandboxes_of(run: Run, attempt: int, servers: int, client: str) -> Sandboxes:
    """Return the sandboxes of an attempt.

    Args:
        servers: how many there are; they are named sandbox-0 and so on.
        client: name of this process.
    """
    token = read_token(run)
    known = [SandboxRoute(OwnService(run, attempt, sandbox_name(server), token), "") for server in range(servers)]
    return Sandboxes(lambda: known, client)


class OwnService:
    """One service, whose address changes when it is restarted."""

    def __init__(self, run: Run, attempt: int, name: str, token: str) -> None:
        self.name, self._run, self._attempt = name, run, attempt
        self.sender = Sender(AttemptKey.of(token, of_process(run.name, name), attempt))
        self._seen: tuple[float, ProcessStatus | None] = float("-inf"), None
        self._lock = threading.Lock()

    def url(self) -> str | None:
        """Return the address, as it was a second ago at most; None: it does not serve."""
        status = self._status()
        return status.facts.get("url") if status and status.state == SERVING else None

    def given_up(self) -> str | None:
        """Return why it will not serve again in this attempt; None: it may."""
        status = self._status()
        return status.state if status and status.state.startswith(GIVEN_UP) else None

    def _status(self) -> ProcessStatus | None:
        with self._lock:
            looked, status = self._seen
            if time.monotonic() - looked > _LOOK_S:
                status = read_process_status(self._run, self.name, self._attempt)
                self._seen = time.monotonic(), status
            return status


class OwnRoute:
    """A route of a service, as whom requests are sent to (Peer, hpcrl/envs/tools/http.py)."""

    def __init__(self, process: OwnService, path: str) -> None:
        self._process, self._path = process, path

    def address(self) -> str | None:
        url = self._process.url()
        return None if url is None else f"{url}{self._path}"

    def headers(self, path: str, body: bytes) -> dict[str, str]:
        return self._process.sender.headers(path, body)

    def is_answer(self, sent: Mapping[str, str], status: int, body: bytes, given: Mapping[str, str]) -> bool:
        return self._process.sender.is_answer(sent[NONCE], status, body, given)


class SandboxRoute(OwnRoute):
    """A route of a server of sandboxes, without which the run goes on as long as there is another one."""

    def address(self) -> str | None:
        if (url := super().address()) is None and (reason := self._process.given_up()) is not None:
            raise GivenUp(f"{self._process.name} is {reason}")
        return url
