"""A real engine that hangs, and one that merely takes its time."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config import Config
from hpcrl.engines.vllm.client import EngineClient
from hpcrl.engines.vllm.server import Server
from hpcrl.errors import EngineError
from hpcrl.rollout.engines.by_length import _measure
from hpcrl.rollout.engines.watchdog import watch_progress
from tests.paths import QUICKSTART
from tests.rollout.conftest import WithEngine
from tests.rollout.material import LONG_PROMPT, PROMPT, as_version, children_of

LONG: dict[str, Any] = {"temperature": 1.0, "max_tokens": 150, "ignore_eos": True}


@pytest.fixture(autouse=True)
def polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is asked ten times as often."""
    monkeypatch.setattr("hpcrl.rollout.engines.watchdog._POLL_S", 0.1)


@contextmanager
def stopped(server: Server) -> Iterator[None]:
    """The process that computes does nothing, while the server answers /health."""
    (core,) = [pid for pid in children_of(server.pid) if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(core, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(core, signal.SIGCONT)


def test_an_engine_that_hangs_is_found(with_engine: WithEngine[Any], server: Server) -> None:
    async def play(engine: EngineClient) -> None:
        with stopped(server):
            running = asyncio.create_task(engine.generate(PROMPT, 2, 1, LONG))
            assert await engine.healthy()
            with pytest.raises(EngineError, match=r"no token and no answer for 1 s, while /inference/v1/generate wait"):
                await asyncio.wait_for(watch_progress(engine, 1.0, 60.0), 20)
        assert len(await running) == 2

    with_engine(play)


def test_a_measurement_of_an_engine_that_hangs_ends(with_engine: WithEngine[Any], server: Server) -> None:
    """As that of `hpcrl bench`, which has nobody else to end it."""
    config = Config.from_toml([QUICKSTART], ["generator.inference_engine.stall_timeout_seconds=1"])
    with_engine(lambda engine: engine.generate(PROMPT, 1, 1, LONG))
    with (
        ThreadPoolExecutor() as pool,
        stopped(server),
        pytest.raises(EngineError, match=r"no token and no answer for 1 s"),
    ):
        pool.submit(asyncio.run, _measure(config, server)).result(60)


def test_one_that_hangs_when_it_is_to_take_in_weights(
    with_engine: WithEngine[Any], server: Server, models: list[Path]
) -> None:
    async def play(engine: EngineClient) -> None:
        with stopped(server):
            update = asyncio.create_task(engine.update_weights(as_version(models[1], 1)))
            with pytest.raises(EngineError, match="while /hpcrl/cores wait"):
                await asyncio.wait_for(watch_progress(engine, 2.0, 60.0), 20)
        await update

    with_engine(play)


def test_an_engine_that_works_or_waits_is_left_alone(with_engine: WithEngine[Any], models: list[Path]) -> None:
    async def play(engine: EngineClient) -> None:
        watching = asyncio.create_task(watch_progress(engine, 2.0, 60.0))
        await asyncio.sleep(2.5)  # nothing to do
        end = asyncio.get_running_loop().time() + 2.5
        version = 0
        while asyncio.get_running_loop().time() < end:
            version += 1
            generating = asyncio.gather(*(engine.generate(LONG_PROMPT, 16, seed, LONG) for seed in range(4)))
            await engine.update_weights(as_version(models[version % 2], version))
            await generating
        assert not watching.done()
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching

    with_engine(play)


def test_weights_take_as_long_as_a_start_may(with_engine: WithEngine[Any], server: Server, models: list[Path]) -> None:
    async def play(engine: EngineClient) -> None:
        await engine._call("POST", "/pause", params={"mode": "keep"})
        with stopped(server):
            loading = asyncio.create_task(engine._call("POST", "/start_weight_update"))
            watching = asyncio.create_task(watch_progress(engine, 1.0, 3.0))
            await asyncio.sleep(1.5)
            assert not watching.done()
            with pytest.raises(EngineError, match="for 3 s, while /start_weight_update wait"):
                await asyncio.wait_for(watching, 20)
        await loading
        info = {"path": str(as_version(models[0], 0).path)}
        await engine._call("POST", "/update_weights", json={"update_info": info})
        await engine._call("POST", "/finish_weight_update", json={"weight_version": "0"})
        await engine._call("POST", "/resume")

    with_engine(play)


def test_an_engine_that_holds_other_weights_than_it_was_given(with_engine: WithEngine[Any], models: list[Path]) -> None:
    class Mistaken(EngineClient):
        async def _call(self, method: str, path: str, **request: Any) -> dict[str, Any]:
            if path == "/finish_weight_update":
                request["json"] = {"weight_version": "6"}
            return await super()._call(method, path, **request)

    async def play(engine: EngineClient) -> None:
        engine.__class__ = Mistaken
        with pytest.raises(EngineError, match="the weights of version 7 and reports version '6'"):
            await engine.update_weights(as_version(models[0], 7))
        assert engine.version == 0
        await engine._call("POST", "/resume")

    with_engine(play)
