"""A server that closes connections it takes for idle, as vLLM's does after five seconds, breaks no request."""

from __future__ import annotations

import asyncio
from pathlib import Path

from hpcrl.rollout.engines.vllm.client import EngineClient

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
