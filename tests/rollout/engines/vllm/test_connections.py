"""What a server may do with its connections: close those that it takes for idle, as vLLM's does after five seconds, and send long events."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from hpcrl.engines.vllm.client import EngineClient

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
