"""What vLLM alone does: a cache of prompts, and the caches of running requests, counted by its own metrics."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import torch

from hpcrl.engines.vllm.client import EngineClient
from hpcrl.engines.vllm.server import Server
from hpcrl.rollout.engines.base import Generation
from hpcrl.runtime.token import bearer
from tests.rollout.conftest import WithEngine
from tests.rollout.engines.test_contract import LENGTH, RUNNING, WHOLE, assert_close, updated_while_running
from tests.rollout.material import LONG_PROMPT, RUN_NAME, TOKEN, as_version, logprobs


async def counted(engine: EngineClient, metric: str) -> float:
    """Return a counter of the server's own metrics."""
    lines = (await engine._asked_at_once("/metrics")).decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{metric}"))


def test_a_prompt_is_found_in_the_cache(with_engine: WithEngine[Any], models: list[Path]) -> None:
    async def play(engine: EngineClient) -> None:
        for version, model in enumerate(models):
            await engine.update_weights(as_version(model, version))
            assert await engine.weight_version() == str(version)
            hits = await counted(engine, "prefix_cache_hits_total")
            for _ in range(2):
                for said in await engine.generate(LONG_PROMPT, 2, 8, WHOLE):
                    assert_close(said, model, LONG_PROMPT)
            assert await counted(engine, "prefix_cache_hits_total") > hits

    with_engine(play)


def test_an_update_drops_the_caches_of_running_requests(with_engine: WithEngine[Any], models: list[Path]) -> None:
    async def play(engine: EngineClient) -> None:
        before = await engine.load()
        await updated_while_running(engine, models[1])
        after = await engine.load()
        assert before is not None
        assert after is not None
        assert (after.updates, after.dropped) == (before.updates + 1, RUNNING)
        assert 0 < after.preemptions - before.preemptions <= RUNNING

    with_engine(play)


def test_running_requests_may_keep_their_caches(server: Server, models: list[Path]) -> None:
    async def play() -> tuple[list[Generation], list[Generation]]:
        engine = EngineClient(server.socket, bearer(TOKEN, RUN_NAME), keep_cache=True)
        try:
            await engine.update_weights(as_version(models[0], 0))
            before = await counted(engine, "num_preemptions_total")
            said = await updated_while_running(engine, models[1])
            assert await counted(engine, "num_preemptions_total") == before
            return said, await engine.generate(LONG_PROMPT, 2, 8, WHOLE)
        finally:
            await engine.close()

    said, later = asyncio.run(play())
    mixed = 0
    for one in said:
        given, switch = torch.tensor(one.logprobs), one.versions.count(0)
        assert 0 < switch < LENGTH
        torch.testing.assert_close(
            given[:switch], logprobs(models[0], LONG_PROMPT, one.token_ids)[:switch], atol=1e-3, rtol=0
        )
        mixed += bool((given - logprobs(models[1], LONG_PROMPT, one.token_ids))[switch:].abs().max() > 0.05)
    assert mixed == RUNNING, "new weights over keys and values of old ones: the bias that the setting names"
    for one in later:  # which finds nothing of the old weights
        assert_close(one, models[1], LONG_PROMPT)
