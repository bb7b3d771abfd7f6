"""Connections of hpcrl's servers: strangers who hold some, send without end or read nothing keep nobody off, and take little memory."""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from typing import Any

import pytest
import uvicorn

from hpcrl.runtime import http_server
from hpcrl.runtime.http_server import Bearer, Guard, Route, bind, serve

KEY, LARGE = {"authorization": "Bearer secret"}, 32 << 20
LINE = b"GET /large HTTP/1.1\r\nhost: x\r\n"
Address = tuple[str, int]


class Ignored:
    def parse(self, content: bytes) -> None:
        del content


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[Address]:
    """Address of a server of at most eight connections, each of which may be idle for a second."""
    monkeypatch.setattr(http_server, "IDLE_S", 1.0)
    monkeypatch.setattr(http_server, "MOST_CONNECTIONS", 8)

    async def large(_: None) -> dict[str, str]:
        return {"text": "x" * LARGE}

    async def small(_: None) -> dict[str, str]:
        return {}

    listener, over = bind("127.0.0.1"), threading.Event()
    app = Guard({"/large": Route(large, Ignored(), "GET"), "/small": Route(small, Ignored(), "GET")}, Bearer("secret"))
    served = serve(app, listener, asyncio.to_thread(over.wait))
    thread = threading.Thread(target=lambda: asyncio.run(served), daemon=True)
    thread.start()
    yield listener.getsockname()[:2]
    over.set()
    thread.join(30)


def connected(address: Address) -> socket.socket:
    return socket.create_connection(address, 60)


def ask(connection: http.client.HTTPConnection) -> int:
    connection.request("GET", "/small", headers=KEY)
    answer = connection.getresponse()
    answer.read()
    return answer.status


def has_ended(connection: socket.socket) -> bool:
    with suppress(ConnectionError):
        return connection.recv(1) == b""
    return True


def test_strangers_keep_nobody_off(address: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest of them ends for each further connection; one on which a request was admitted stays."""
    monkeypatch.setattr(http_server, "IDLE_S", 60.0)
    with ExitStack() as stack:
        kept = stack.enter_context(closing(http.client.HTTPConnection(*address, timeout=60)))
        assert ask(kept) == 200
        kept.auto_open = 0
        strangers = [stack.enter_context(connected(address)) for _ in range(40)]
        new = stack.enter_context(closing(http.client.HTTPConnection(*address, timeout=60)))
        assert ask(new) == 200
        assert ask(kept) == 200
        assert all(map(has_ended, strangers[:34]))
        strangers[-1].sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert strangers[-1].recv(12) == b"HTTP/1.1 401"


def test_where_all_are_admitted_no_further_one_is(address: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "IDLE_S", 60.0)
    with ExitStack() as stack:
        kept = [stack.enter_context(closing(http.client.HTTPConnection(*address, timeout=60))) for _ in range(8)]
        assert [ask(one) for one in kept] == [200] * 8
        assert has_ended(stack.enter_context(connected(address)))
        assert [ask(one) for one in kept] == [200] * 8


@pytest.mark.parametrize("line", [b"a: b\r\n" * 100, b"a" * 1000], ids=["lines", "one line"])
def test_a_head_without_end_is_not_read(address: Address, line: bytes) -> None:
    with connected(address) as stranger:
        stranger.sendall(LINE)
        with pytest.raises(ConnectionError):
            stranger.sendall(line * 100_000)


def test_a_stranger_gets_one_answer(address: Address) -> None:
    """Else the answers to requests that were sent together could wait unread for ever."""
    with connected(address) as stranger:
        stranger.sendall((LINE + b"\r\n") * 50)
        answers = b""
        with suppress(ConnectionError):
            while part := stranger.recv(1 << 16):
                answers += part
        assert answers.count(b"HTTP/1.1 401") == 1


def test_an_answer_that_nobody_reads_is_given_up(address: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "IDLE_S", 0.5)
    with connected(address) as waits:
        waits.sendall(LINE + b"authorization: Bearer secret\r\n\r\n")
        assert waits.recv(12) == b"HTTP/1.1 200"
        time.sleep(3)
        found = 0
        with suppress(ConnectionError):
            while part := waits.recv(1 << 20):
                found += len(part)
        assert 0 < found < LARGE


@pytest.mark.parametrize(("bytes_each", "pause_s", "stays"), [(100_000, 0.25, True), (1_000, 0.4, False)])
def test_a_slow_body_is_read_as_long_as_it_comes(
    address: Address, bytes_each: int, pause_s: float, stays: bool
) -> None:
    head = (
        f"GET /small HTTP/1.1\r\nhost: x\r\nauthorization: Bearer secret\r\ncontent-length: {10 * bytes_each}\r\n\r\n"
    )
    with connected(address) as connection:
        connection.sendall(head.encode())
        with suppress(ConnectionError):
            for _ in range(10):
                time.sleep(pause_s)
                connection.sendall(b"x" * bytes_each)
        assert has_ended(connection) != stays


def test_a_websocket_is_no_way_around_the_bounds() -> None:
    """vLLM's server would speak it; a handshake that is refused leaves nothing behind."""

    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})

    async def play() -> int:
        listener = bind("127.0.0.1")
        server = uvicorn.Server(
            uvicorn.Config(refuse, http=http_server.BoundedConnection, lifespan="off", log_config=None)
        )
        serving = asyncio.create_task(server.serve([listener]))
        reader, writer = await asyncio.open_connection(*listener.getsockname()[:2])
        writer.write(
            b"GET / HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
        await reader.read(1)
        writer.close()
        await asyncio.sleep(0.1)
        server.should_exit = True
        await serving
        return len(http_server._unproven.get(server.server_state, ()))

    assert asyncio.run(play()) == 0


def test_a_body_that_comes_slowly_is_refused(address: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile it counts among the bytes that a server holds, and enough of it comes that its connection is not idle."""
    monkeypatch.setattr(http_server, "BODY_S", 0.5)
    monkeypatch.setattr(http_server, "_LEAST_BODY", 1)
    with connected(address) as connection:
        head = (
            f"GET /small HTTP/1.1\r\nhost: x\r\nauthorization: {KEY['authorization']}\r\ncontent-length: 1000\r\n\r\n"
        )
        connection.sendall(head.encode())
        connection.settimeout(0.05)
        deadline, answer = time.monotonic() + 60, b""
        while not answer and time.monotonic() < deadline:
            with suppress(TimeoutError):
                connection.sendall(b" ")
                answer = connection.recv(4096)
        assert answer.startswith(b"HTTP/1.1 408 "), answer
