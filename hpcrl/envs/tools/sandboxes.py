"""Sandboxes of a run, as an environment uses them: started at a server with room, one for each sample (hpcrl/sandboxes/server.py).

After SandboxLost an episode may go on in another sandbox, from its last snapshot. After SandboxError it would fail there too; its text names
no address, as environments show it to policies.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

import httpx

from hpcrl.envs.base import GIVEN_UP, WAITING
from hpcrl.envs.tools.http import GivenUp, Peer
from hpcrl.envs.tools.requests import Compressed, ServiceAnswer, build_request, in_background, send
from hpcrl.errors import DeviceError, SandboxError, ServiceError

_START_S, _CALL_S, _END_S = 900.0, 600.0, 10.0  # the first start on a node unpacks the image
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 8.0
_TRIES, _BUSY_S = 3, 60.0
_BUSY, _UNKNOWN, _FULL = 429, 401, 503
_WRONG = (400, 404, 413)
_UNREADABLE = (ValueError, TypeError, KeyError, RecursionError)
_MOST_BYTES = 32 << 20
_PER_BYTE = 24  # of a line of the answer: a program may write its bytes one by one


class SandboxLost(ServiceError):
    """A sandbox, or its node, is gone."""


class _NotHere(Exception):
    """A server starts no sandbox now."""


@dataclass(frozen=True)
class RunResult:
    """What became of a program of a sandbox, and what it wrote.

    Attributes:
        code: its exit code, 128 and the number of the signal that ended it; None where it was ended.
        ended: why it was ended: time, memory, output, cancelled, or killed by another program of the sandbox; else empty.
        stdout, stderr: the beginning of both, in bytes.
    """

    code: int | None
    ended: str
    stdout: bytes
    stderr: bytes


class Sandboxes:
    """Starts sandboxes at the servers of a run; several threads may share it.

    Args:
        servers: returns those that serve now, each with the address of its root; called before each round of questions.
        client: name of this process, which a later process has after its restart; a server then ends the sandboxes of the earlier one.
    """

    def __init__(self, servers: Callable[[], Sequence[Peer]], client: str = "") -> None:
        self._servers, self._turn = servers, count(random.randrange(1 << 16))
        self._client = {"client": client, "client_started": time.time()}

    def start(
        self, image: str, *, network: bool = False, snapshot: str | None = None, wait_s: float = 600.0
    ) -> SandboxClient:
        """Start a sandbox, and return it; `end` it.

        Args:
            network: whether its programs have the node's network, which slurm.sandboxes.network allows by image.
            snapshot: digest of the changes with which it begins, of `SandboxClient.snapshot`.
            wait_s: how long to ask again while all servers are full, or away.

        Raises:
            SandboxError: there is no such image or snapshot, or the image may have no network.
            DeviceError: no server of the run will ever start one.
            ServiceError: no server has started one in time, or nobody waits for it any more.
        """
        asked = {"image": image, "network": network, "snapshot": snapshot or ""}
        content = json.dumps(asked | self._client).encode()
        deadline, wait, why = time.monotonic() + wait_s, _FIRST_WAIT_S, "no server is there"
        while True:
            if GIVEN_UP.get()():
                raise ServiceError(f"no sandbox of image {image!r}: nobody waits for it any more")
            servers, gone = self._servers(), 0
            first = next(self._turn) % max(1, len(servers))
            for server in (*servers[first:], *servers[:first]):
                try:
                    return _start_at(server, content)
                except _NotHere as reason:
                    why = str(reason)
                except GivenUp as reason:
                    why, gone = str(reason), gone + 1
            if 0 < gone == len(servers):
                raise DeviceError(f"no node of the run has sandboxes: {why}; what they need is in docs/sandboxes.md")
            if (left := deadline - time.monotonic()) <= 0:
                raise ServiceError(f"no sandbox of image {image!r} within {wait_s:g} s: {why}")
            with WAITING.get()():  # samples with a sandbox go on, and end
                time.sleep(min(left, wait * random.uniform(0.5, 1.0)))
            wait = min(_LONGEST_WAIT_S, 2 * wait)


class SandboxClient:
    """One sandbox, which this process keeps until its `end`; one call at a time.

    Every call raises SandboxLost where the sandbox or its node is gone, and SandboxError where what is asked is wrong or refused.

    Args:
        url: address of its server.
        key: what its calls show; of this sandbox alone.
        lease_s: time without a sign of this process after which its server ends it.
    """

    def __init__(self, url: str, key: str, lease_s: float) -> None:
        self.url, self.key, self._headers = url, key, {"authorization": f"Bearer {key}"}
        renewing = in_background(_renew(url, self._headers, lease_s / 3))
        self._let_go = weakref.finalize(self, renewing.cancel)  # also of one that is forgotten

    def run(
        self,
        command: Sequence[str],
        seconds: float,
        *,
        input: bytes = b"",
        environment: Mapping[str, str] | None = None,
        directory: str | None = None,
        most: int = 1 << 20,
    ) -> RunResult:
        """Run a program, and return what became of it.

        Args:
            seconds: time after which it is ended, with its processes.
            input: all that it can read.
            environment: variables beside those of the image.
            directory: in which it starts; None: that of the image.
            most: bytes that it may write, to both streams together; it is ended when it writes more.
        """
        asked = {
            "command": list(command),
            "seconds": seconds,
            "input": base64.b64encode(input).decode(),
            "environment": dict(environment or {}),
            "directory": directory or "",
            "most": most,
        }
        content = self._ask("/exec", asked, seconds + _END_S, (1 << 16) + _PER_BYTE * most, tries=1)
        try:
            last, stdout, stderr = _output(content)
            if "error" in last:
                raise SandboxLost(f"{self.url}: {last['error']}")
            return RunResult(last["code"], last["ended"], stdout, stderr)
        except _UNREADABLE as error:
            raise SandboxLost(f"{self.url}: the server has ended within its answer") from error

    def write(self, path: str, content: bytes, mode: int = 0o644) -> None:
        """Write a file, with the directories above it; at most 11 MiB."""
        self._ask("/write", {"path": path, "content": base64.b64encode(content).decode(), "mode": mode})

    def read(self, path: str) -> bytes:
        """Return the content of a regular file; at most 16 MiB."""
        return base64.b64decode(self._object("/read", {"path": path}, "content"))

    def expect(self) -> None:
        """Raise SandboxLost where it is gone."""
        self._ask("/renew", {})

    def snapshot(self, only: Sequence[str] = ()) -> str:
        """Keep what its programs have changed, and return the digest with which another sandbox of the image can begin.

        Args:
            only: absolute paths; what is at and below them is kept; empty: all.
        """
        return self._object("/snapshot", {"only": list(only)}, "snapshot")

    def end(self) -> None:
        """End the sandbox; one that is lost has ended."""
        self._let_go()
        with suppress(SandboxLost):
            self._ask("/end", {}, _END_S, tries=1)

    def _object(self, path: str, asked: Mapping[str, Any], name: str) -> str:
        try:
            found = json.loads(self._ask(path, asked))[name]
        except _UNREADABLE as error:
            raise SandboxLost(f"{self.url}: what answers there is no server of sandboxes") from error
        return str(found)

    def _ask(
        self,
        path: str,
        asked: Mapping[str, Any],
        seconds: float = _CALL_S,
        most_bytes: int = _MOST_BYTES,
        *,
        tries: int = _TRIES,
    ) -> bytes:
        content, begun = json.dumps(asked).encode(), time.monotonic()
        while True:
            try:
                status, body, _ = _answer(self.url + path, self._headers, content, seconds, most_bytes)
            except (httpx.TransportError, Compressed) as error:
                tries -= 1
                if not tries or isinstance(error, (httpx.ConnectError, Compressed)):
                    raise SandboxLost(f"{self.url}: {str(error) or type(error).__name__}") from error
            else:
                if status == 200:
                    return body
                if status in _WRONG or (status == _BUSY and time.monotonic() - begun > _BUSY_S):
                    raise SandboxError(f"{path} of a sandbox is refused ({status}): {_reason(body)}")
                if status != _BUSY:
                    raise SandboxLost(f"{self.url}{path} answered {status}: {_reason(body)}")
            time.sleep(_FIRST_WAIT_S)


def _start_at(server: Peer, content: bytes) -> SandboxClient:
    """Start a sandbox at a server. Raises _NotHere where another server, or another time, may do it, and SandboxError where none can."""
    if (url := server.address()) is None:
        raise _NotHere("a server is away")
    shown = server.headers("/start", content)
    try:
        status, body, given = _answer(f"{url}/start", shown, content, _START_S, _MOST_BYTES)
    except (httpx.TransportError, Compressed) as error:
        raise _NotHere(f"{url}: {str(error) or type(error).__name__}") from error
    if not server.is_answer(shown, status, body, given):
        raise _NotHere(f"{url}: what answers there is no server of this run")
    if status in _WRONG:
        raise SandboxError(f"no sandbox starts ({status}): {_reason(body)}")
    if status != 200:
        raise _NotHere(f"{url} answered {status}: {_reason(body)}")
    found = json.loads(body)
    return SandboxClient(url, found["key"], found["lease_s"])


def _answer(url: str, headers: Mapping[str, str], content: bytes, seconds: float, most_bytes: int) -> ServiceAnswer:
    request = build_request("POST", httpx.URL(url), dict(headers), content=content)
    return in_background(send(request, most_bytes, seconds, inside=True)).result()


def _output(content: bytes) -> tuple[dict[str, Any], bytes, bytes]:
    """Return the last line of an answer to /exec, and what a program wrote to both streams; one by one, as a line may have one byte."""
    last, streams = dict[str, Any](), {"stdout": bytearray(), "stderr": bytearray()}
    for line in io.BytesIO(content):
        if not isinstance(last := json.loads(line), dict):
            raise ValueError("expected objects")
        for name in streams.keys() & last.keys():
            streams[name] += base64.b64decode(last[name])
    return last, bytes(streams["stdout"]), bytes(streams["stderr"])


async def _renew(url: str, headers: Mapping[str, str], every_s: float) -> None:
    """Renew the lease of a sandbox until it is unknown at its server, or this task is cancelled."""
    while True:
        await asyncio.sleep(every_s)
        request = build_request("POST", httpx.URL(f"{url}/renew"), dict(headers), content=b"{}")
        with suppress(httpx.TransportError, Compressed):
            if (await send(request, _MOST_BYTES, every_s, inside=True)).status == _UNKNOWN:
                return


def _reason(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"])[:500]
    except _UNREADABLE:
        return repr(body[:300])
