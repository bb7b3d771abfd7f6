"""What requests may cost before anything is generated: their size is looked at first, large ones take a thread, and bodies under way are counted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import httpx
import pytest

from hpcrl.config import GeneratorConfig
from hpcrl.engines.embedded.rollout import Embedded
from hpcrl.envs.base import Endpoint
from hpcrl.errors import EngineError
from hpcrl.rollout.endpoint import server as server_module
from hpcrl.rollout.endpoint.server import PolicyServer, serving
from hpcrl.rollout.endpoint.session import MOST_HELD, Session
from hpcrl.rollout.engines.base import Engine, Generation
from hpcrl.rollout.engines.watchdog import run_watched
from hpcrl.runtime import http_server
from hpcrl.runtime.http_server import MAX_BODY
from tests.rollout.endpoint.test_endpoint import CONFIG, TOKENIZER, user

LONG = replace(CONFIG, max_input_length=10**7)
Ask = Callable[..., Coroutine[Any, Any, httpx.Response]]


async def say(*_: Any) -> Generation:
    return Generation([5, 1], [-0.5] * 2, "stop", [0] * 2)


def with_endpoint(play: Callable[[PolicyServer, Ask], Awaitable[None]], config: GeneratorConfig = CONFIG) -> None:
    """Run a coroutine function with an endpoint, and what asks there for a session with chat messages."""

    async def main() -> None:
        async with serving(config, TOKENIZER, 0) as server, httpx.AsyncClient(timeout=120) as http:
            assert server is not None

            async def ask(endpoint: Endpoint, path: str = "chat/completions", **body: Any) -> httpx.Response:
                headers = {"authorization": f"Bearer {endpoint.key}"}
                return await http.post(f"{endpoint.base_url}/{path}", json={"model": "policy", **body}, headers=headers)

            await play(server, ask)

    asyncio.run(main())


def refused(answer: httpx.Response) -> tuple[int, str, str]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["message"]


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ({"messages": [user("cab " * 3_750_000)]}, "15000004 characters"),
        ({"messages": [user("c")] * 50_000}, "50000 messages"),
        ({"messages": [user("c")], "tools": [{"description": "cab " * 100_000}]}, "400005 characters"),
    ],
    ids=["content", "messages", "tools"],
)
def test_what_is_too_long_is_declined_before_it_is_tokenized(body: dict[str, Any], found: str) -> None:
    async def play(server: PolicyServer, ask: Ask) -> None:
        async with server.session(say, CONFIG.sampling_params) as (session, endpoint):
            status, code, message = refused(await ask(endpoint, **body))
            assert (status, code) == (400, "context_length_exceeded")
            assert f"prompt is too long: it has {found}, and generator.max_input_length is 120 tokens" in message
            assert session.stop_reason == "length"

    with_endpoint(play)


def test_too_many_token_ids_are_declined() -> None:
    async def play(server: PolicyServer, ask: Ask) -> None:
        async with server.session(say, CONFIG.sampling_params) as (_, endpoint):
            status, code, message = refused(await ask(endpoint, "completions", prompt=[5] * 40_000))
            assert (status, code) == (400, "context_length_exceeded")
            assert "40000 tokens" in message
            nothing = await ask(endpoint, "completions", prompt="\U0001f642")
            assert refused(nothing)[2] == "the prompt has no tokens"

    with_endpoint(play)


def test_another_sample_is_answered_while_a_large_request_is_tokenized() -> None:
    async def play(server: PolicyServer, ask: Ask) -> None:
        async with (
            server.session(say, CONFIG.sampling_params) as (session, large),
            server.session(say, CONFIG.sampling_params) as (_, small),
        ):
            first = await ask(large, messages=[user("cab")])
            assert first.status_code == 200
            tokenized = [asyncio.create_task(ask(large, messages=[user("cab " * 200_000)])) for _ in range(2)]
            await until(session._large.locked)
            for _ in range(5):
                assert (await ask(small, messages=[user("cab")])).status_code == 200
            assert not tokenized[1].done(), "the other sample has waited for it"
            assert {one.status_code for one in await asyncio.gather(*tokenized)} == {200}

    with_endpoint(play, LONG)


def test_turns_are_counted_while_large_requests_are_tokenized() -> None:
    async def play(server: PolicyServer, ask: Ask) -> None:
        async with server.session(say, CONFIG.sampling_params) as (session, endpoint):
            asked = [ask(endpoint, messages=[user("cab " * 5_000)]) for _ in range(5)]
            statuses = sorted([one.status_code for one in await asyncio.gather(*asked)])
            assert statuses == [200, 200, 400, 400, 400]
            assert len(session.answers) == 2

    with_endpoint(play, replace(LONG, max_turns=2))


async def begun(endpoint: Endpoint, size: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return a connection with a request whose body lacks its end."""
    where = httpx.URL(endpoint.base_url)
    reader, writer = await asyncio.open_connection(where.host, where.port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {endpoint.key}\r\ncontent-length: {size + 1}\r\n\r\n"
    writer.write(head.encode() + b" " * size)
    with suppress(ConnectionError):
        await writer.drain()
    return reader, writer


async def until(found: Callable[[], bool]) -> None:
    async def wait() -> None:
        while not found():
            await asyncio.sleep(0.02)

    await asyncio.wait_for(wait(), 60)


def test_bodies_that_are_too_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one key have a bound; a body beyond it is answered when there is room, also if that takes longer than a connection may idle."""
    monkeypatch.setattr(http_server, "IDLE_S", 0.2)
    size = MAX_BODY - 1

    async def play(server: PolicyServer, ask: Ask) -> None:
        async with (
            server.session(slow, CONFIG.sampling_params) as (session, hungry),
            server.session(say, CONFIG.sampling_params) as (_, other),
        ):
            large = {"messages": [user("cab")], "filler": "x" * (size // 2 + size // 4)}
            held = [asyncio.create_task(ask(hungry, **large)) for _ in range(2)]
            await until(lambda: session.held > MOST_HELD // 2)
            waits = asyncio.create_task(ask(hungry, **large))
            assert (await ask(other, messages=[user("cab")])).status_code == 200
            await asyncio.sleep(1.0)
            assert not waits.done()
            assert session.held <= MOST_HELD
            go_on.set()
            assert {one.status_code for one in await asyncio.gather(*held, waits)} == {200}
            assert session.held == 0

    go_on = asyncio.Event()

    async def slow(*_: Any) -> Generation:
        await go_on.wait()
        return await say()

    with_endpoint(play)


def test_a_body_that_waits_ends_with_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies of all samples together have a bound."""
    monkeypatch.setattr(server_module, "_MOST_HELD", 1 << 20)

    async def play(server: PolicyServer, ask: Ask) -> None:
        async with server.session(say, CONFIG.sampling_params) as (first, one):
            async with server.session(say, CONFIG.sampling_params) as (_, other):
                _held = await begun(one, 900_000)
                await until(lambda: first.held > 900_000)
                waits = asyncio.create_task(ask(other, messages=[user("c" * 200_000)]))
                assert (await ask(other, messages=[user("cab")])).status_code == 200
                assert not waits.done()
            assert refused(await waits)[:2] == (429, "session_over")

    with_endpoint(play)


def test_who_is_under_way_when_the_engine_fails_hears_that_the_sample_is_over(embedded: Embedded) -> None:
    """With a status of the protocol: clients ask again later, and nothing is in the log."""
    answers = list[httpx.Response]()

    async def fails(begun: Sequence[asyncio.Event]) -> None:
        for one in begun:
            await one.wait()
        raise EngineError("rollout-0: the engine died")

    async def main() -> None:
        engine: Engine = embedded.connect()
        generating = asyncio.Event()

        async def generate(*_: Any) -> Generation:
            generating.set()
            await asyncio.Event().wait()
            raise AssertionError

        async def serve() -> None:
            async with serving(CONFIG, TOKENIZER, 0) as server:
                assert server is not None
                async with server.session(generate, CONFIG.sampling_params) as (session, endpoint):
                    client.append(asyncio.create_task(asyncio.to_thread(ask, session, endpoint)))
                    await asyncio.Event().wait()

        def ask(_: Session, endpoint: Endpoint) -> None:
            body = {"model": "policy", "messages": [user("cab")]}
            headers = {"authorization": f"Bearer {endpoint.key}"}
            answers.append(httpx.post(f"{endpoint.base_url}/chat/completions", json=body, headers=headers, timeout=60))

        client = list[asyncio.Task[None]]()
        with pytest.raises(EngineError, match="the engine died"):
            await run_watched(embedded, engine, [serve(), fails([generating])], 300, 300)

    asyncio.run(main())  # which waits for the thread
    assert refused(answers[0])[:2] == (429, "session_over"), json.dumps(answers[0].text)
