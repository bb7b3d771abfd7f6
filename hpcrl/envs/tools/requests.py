"""Sends HTTP requests to services from one event loop of the process, and bounds each answer in bytes and the whole request in time.

A synchronous client has a time limit for each read only: an answer whose header comes byte by byte would keep its thread for ever.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from functools import cache
from typing import Any, NamedTuple, TypeVar

import httpx

R = TypeVar("R")

_CONNECT_S = 10.0
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_PLAIN = "identity"
_GONE_S = 60  # after which a node that is gone counts as such
_ENDS_WITH_NODE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _GONE_S // 3),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _GONE_S // 6),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _GONE_S),
]


class Compressed(Exception):
    """A service compresses its answer without a request for that: a few bytes could become gigabytes."""


class ServiceAnswer(NamedTuple):
    """Answer of a service."""

    status: int
    content: bytes
    headers: httpx.Headers


class _Background:
    """A thread with an event loop, in which requests can be cancelled; one for all threads of the process that wait for services."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        # one that was idle may be closed at the moment at which it is used again, and what was asked on it then counts as begun
        self.fresh = _client(httpx.Limits(max_connections=None, max_keepalive_connections=0))
        self.client = _client(httpx.Limits(max_connections=None))
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        inside = httpx.AsyncHTTPTransport(trust_env=False, limits=limits, socket_options=_ENDS_WITH_NODE)
        self.inside = httpx.AsyncClient(headers={"accept-encoding": _PLAIN}, transport=inside, trust_env=False)
        threading.Thread(target=self.loop.run_forever, name="services", daemon=True).start()


def _client(limits: httpx.Limits) -> httpx.AsyncClient:
    direct = {f"all://{host}": None for host in _LOOPBACK}  # a proxy in the environment is used for other hosts
    seconds = httpx.Timeout(None, connect=_CONNECT_S)
    return httpx.AsyncClient(headers={"accept-encoding": _PLAIN}, timeout=seconds, limits=limits, mounts=direct)


_starting = threading.Lock()


@cache
def _made() -> _Background:
    return _Background()


def _background() -> _Background:
    with _starting:
        return _made()


def in_background(coroutine: Coroutine[Any, Any, R]) -> Future[R]:
    """Start a coroutine in the event loop that sends requests."""
    return asyncio.run_coroutine_threadsafe(coroutine, _background().loop)


def build_request(method: str, url: httpx.URL, headers: dict[str, str] | None = None, **body: Any) -> httpx.Request:
    """Return a request whose `body` is `json`, `data` or `content` of httpx."""
    return _background().client.build_request(method, url, headers=headers, **body)


async def send(
    request: httpx.Request, most_bytes: int, seconds: float | None = None, *, fresh: bool = False, inside: bool = False
) -> ServiceAnswer:
    """Return the answer to a request; runs in the background's event loop. Redirects are not followed.

    Args:
        most_bytes: a longer answer ends after one byte more.
        seconds: limit of the whole request; None: any time.
        fresh: whether the request gets a connection of its own.
        inside: whether it goes to a node of the run: on a connection of its own, without a proxy, which ends with the node.

    Raises:
        httpx.TransportError: the service gave no answer, or not all of it in time.
        Compressed: the answer is compressed.
    """
    client = _background().inside if inside else _background().fresh if fresh else _background().client
    if seconds is not None:  # which bound the connection too
        request.extensions["timeout"] = httpx.Timeout(None, connect=_CONNECT_S if inside else None).as_dict()
    try:
        return await asyncio.wait_for(_send(client, request, most_bytes), seconds)
    except asyncio.TimeoutError:
        raise httpx.ReadTimeout(f"no whole answer within {seconds:g} s") from None
    except httpx.ConnectError as error:
        raise httpx.ConnectError(_reason(error)) from error


async def _send(client: httpx.AsyncClient, request: httpx.Request, most_bytes: int) -> ServiceAnswer:
    answer, content = await client.send(request, stream=True), bytearray()
    try:
        if (encoding := answer.headers.get("content-encoding", _PLAIN)) != _PLAIN:
            raise Compressed(f"its answer is compressed ({encoding!r:.40}), which was not asked for")
        async for piece in answer.aiter_raw():
            content += piece
            if len(content) > most_bytes:
                break
        return ServiceAnswer(answer.status_code, bytes(content[: most_bytes + 1]), answer.headers)
    finally:
        await answer.aclose()


def _reason(error: BaseException) -> str:
    """Return why nothing connects, of the errors that led to one: asyncio has no more to say than that all attempts failed."""
    found: BaseException | None = error
    while found is not None:
        error = found
        found = error.__cause__ or error.__context__ or next(iter(getattr(error, "exceptions", ())), None)
    own = isinstance(error, (socket.gaierror, ssl.SSLError))  # whose numbers are not those of the system
    return os.strerror(error.errno) if isinstance(error, OSError) and error.errno and not own else str(error)
