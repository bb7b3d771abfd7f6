"""What a server may do with its connections: close those that it takes for idle, as vLLM's does after five seconds, and send long events."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from hpcrl.engines.vllm.address import Address
from hpcrl.engines.vllm.client import EngineClient
from hpcrl.errors import EngineError, RefusedRequestError

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


async def _answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer a connection's first request; a second one arrives at the moment when the server closes it."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(ANSWER)
    await writer.drain()
    await reader.read(1)
    writer.close()


def test_a_connection_that_the_server_closes_breaks_no_request(tmp_path: Path) -> None:
    async def play() -> None:
        server = await asyncio.start_unix_server(_answer_once, tmp_path / "socket")
        engine = EngineClient(tmp_path / "socket", {})
        assert [await engine.healthy() for _ in range(3)] == [True, True, True]
        await engine.close()
        server.close()

    asyncio.run(play())


def test_an_event_may_be_long(tmp_path: Path) -> None:
    """One has all the probable tokens in the place of each of its own, or the experts of a whole response."""
    event = {"choices": [], "routed_experts": "x" * (1 << 20)}

    async def stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n")
        writer.write(f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode())
        await writer.drain()
        writer.close()

    async def play() -> None:
        server = await asyncio.start_unix_server(stream, tmp_path / "socket")
        engine = EngineClient(tmp_path / "socket", {})
        assert [said async for said in engine._events("/inference/v1/generate", {})] == [event]
        await engine.close()
        server.close()

    asyncio.run(play())


def test_a_redirect_is_not_followed() -> None:
    """It names another server, which would get the key, the lease and what is asked."""
    heard = list[bytes]()

    async def listens(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readuntil(b"\r\n\r\n"))
        await _say(writer, ANSWER)

    async def play() -> None:
        other = await asyncio.start_server(listens, "127.0.0.2")
        where = f"http://127.0.0.2:{other.sockets[0].getsockname()[1]}/health"

        async def redirects(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            await _say(writer, f"HTTP/1.1 307 Away\r\nlocation: {where}\r\ncontent-length: 0\r\n\r\n".encode())

        server = await asyncio.start_server(redirects, "127.0.0.1")
        address = Address(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        engine = EngineClient(address, {"x-hpcrl-lease": "secret"})
        assert not await engine.healthy()
        with pytest.raises(EngineError, match=r"refused /weight_info \(307\)"):
            await engine.weight_version()
        await engine.close()
        assert heard == []
        for one in (server, other):
            one.close()

    asyncio.run(play())


async def _say(writer: asyncio.StreamWriter, answer: bytes) -> None:
    writer.write(answer)
    await writer.drain()
    writer.close()


@pytest.mark.parametrize("status", [400, 413, 422, 500, 501, 401, 404, 409, 503])
@pytest.mark.parametrize("well", [True, False])
def test_only_a_refused_request_of_an_engine_that_is_well_is_a_samples_failure(
    tmp_path: Path, status: int, well: bool
) -> None:
    async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readuntil(b"\r\n\r\n")
        found = (200 if well else 503) if asked.startswith(b"GET /health ") else status
        await _say(writer, f"HTTP/1.1 {found} x\r\ncontent-length: 3\r\n\r\nwhy".encode())

    async def play() -> None:
        server = await asyncio.start_unix_server(answers, tmp_path / "socket")
        engine = EngineClient(tmp_path / "socket", {})
        expected = RefusedRequestError if status in (400, 413, 422) or (status in (500, 501) and well) else EngineError
        with pytest.raises(expected, match=f"{status}.*why"):
            await engine.generate([1], 1, 0, {})
        with pytest.raises(EngineError):
            await engine.sleep()
        await engine.close()
        server.close()

    asyncio.run(play())
