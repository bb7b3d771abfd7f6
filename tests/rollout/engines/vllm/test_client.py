"""Tokens in, tokens and logprobs out, checked against transformers; new weights under idle and running engines."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcrl.errors import EngineError
from hpcrl.rollout.engines.base import Generation
from hpcrl.rollout.engines.vllm.client import EngineClient
from hpcrl.rollout.engines.vllm.server import Server
from hpcrl.rollout.limiter import ConcurrencyLimiter
from hpcrl.runtime.controller_client import headers
from tests.rollout.conftest import WithEngine
from tests.rollout.material import (
    BATCHED_TOKENS,
    EOS,
    LONG_PROMPT,
    MAX_MODEL_LEN,
    PROMPT,
    RUN_NAME,
    TOKEN,
    as_version,
    logprobs,
)

WHOLE: dict[str, Any] = {"temperature": 1.0, "max_tokens": 24}
RUNNING, LENGTH = 16, 600  # samples that an update meets, long enough for it to come in time on a busy machine


def assert_close(said: Generation, model: Path, prompt: list[int], temperature: float = 1.0) -> None:
    expected = logprobs(model, prompt, said.token_ids, temperature)
    torch.testing.assert_close(torch.tensor(said.logprobs), expected, atol=1e-3, rtol=0)


async def counted(engine: EngineClient, metric: str) -> float:
    """Return a counter of the server's own metrics."""
    lines = (await engine._http.get("/metrics")).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{metric}"))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_transformers(
    with_engine: WithEngine[Any], models: list[Path], temperature: float
) -> None:
    sampling = {**WHOLE, "temperature": temperature}
    for said in with_engine(lambda engine: engine.generate(PROMPT, 4, 3, sampling)):
        assert_close(said, models[0], PROMPT, temperature)


def test_seeds_reproduce(with_engine: WithEngine[Any]) -> None:
    async def play(engine: EngineClient) -> None:
        first, noise, second = await asyncio.gather(
            engine.generate(PROMPT, 6, 11, WHOLE),
            engine.generate(PROMPT, 6, 50, WHOLE),
            engine.generate(PROMPT, 6, 11, WHOLE),
        )
        assert [said.token_ids for said in first] == [said.token_ids for said in second]
        assert [said.token_ids for said in first] != [said.token_ids for said in noise]
        assert len({tuple(said.token_ids) for said in first}) > 1
        (alone,) = await engine.generate(PROMPT, 1, 13, WHOLE)
        assert alone.token_ids == first[2].token_ids  # sample i is that of seed + i

    with_engine(play)


def test_more_prompts_than_a_batch_has_room_for(with_engine: WithEngine[Any]) -> None:
    prompts = [
        [4 + number % 13, 4 + number // 13, *LONG_PROMPT] for number in range(2 * BATCHED_TOKENS // len(LONG_PROMPT))
    ]

    async def play(engine: EngineClient) -> None:
        said = await asyncio.gather(*(engine.generate(prompt, 1, 3, WHOLE) for prompt in prompts))
        for number in (0, -1):
            (alone,) = await engine.generate(prompts[number], 1, 3, WHOLE)
            assert said[number][0].token_ids == alone.token_ids

    with_engine(play)


def test_a_response_ends_with_its_end_token(with_engine: WithEngine[Any]) -> None:
    sampling = {"temperature": 1.0, "max_tokens": 200}
    said = with_engine(lambda engine: engine.generate(PROMPT, 32, 5, sampling))
    stopped = [generation for generation in said if generation.stop_reason == "stop"]
    assert stopped
    for generation in stopped:
        assert generation.token_ids[-1] == EOS
        assert EOS not in generation.token_ids[:-1]
    assert all(len(g.token_ids) == len(g.logprobs) for g in said)


def test_sampling_options_reach_the_engine(with_engine: WithEngine[Any]) -> None:
    async def ids(engine: EngineClient, **options: Any) -> list[list[int]]:
        said = await engine.generate(PROMPT, 8, 21, {**WHOLE, "ignore_eos": True, **options})
        return [generation.token_ids for generation in said]

    async def play(engine: EngineClient) -> None:
        greedy = (await ids(engine, temperature=0.0))[0]
        plain = await ids(engine)
        assert any(one != greedy for one in plain)
        for options in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
            assert all(one == greedy for one in await ids(engine, **options)), options
        assert all(len(one) == 3 for one in await ids(engine, max_tokens=3))
        varied = await ids(engine, repetition_penalty=5.0)
        assert sum(len(set(one)) for one in varied) > sum(len(set(one)) for one in plain)
        long = await ids(engine, ignore_eos=False, min_tokens=20)
        assert all(len(one) >= 20 for one in long)

    with_engine(play)


def test_stop_strings_end_a_response(with_engine: WithEngine[Any]) -> None:
    async def play(engine: EngineClient) -> None:
        letters = {**WHOLE, "max_tokens": 100, "ignore_eos": True, "seed": None}
        (plain,) = await engine.generate(PROMPT, 1, 2, letters)
        assert plain.stop_reason == "length"
        stops = await engine.generate(PROMPT, 8, 2, {**letters, "stop": ["c"]})
        assert {said.stop_reason for said in stops} == {"stop"}
        assert len({said.token_ids[-1] for said in stops}) == 1
        assert all(said.token_ids[-1] not in said.token_ids[:-1] for said in stops)

    with_engine(play)


def test_refused_request_tells_the_servers_reason(with_engine: WithEngine[Any]) -> None:
    with pytest.raises(EngineError, match=rf"400.*{MAX_MODEL_LEN}"):
        with_engine(lambda engine: engine.generate([4] * (MAX_MODEL_LEN + 1), 1, 0, WHOLE))
    with pytest.raises(EngineError, match="top_p"):
        with_engine(lambda engine: engine.generate(PROMPT, 1, 0, {"top_p": 7.0}))


def test_new_weights_answer_the_same_prompt(with_engine: WithEngine[Any], models: list[Path]) -> None:
    async def play(engine: EngineClient) -> None:
        for version, model in enumerate([models[0], models[1], models[2], models[0]]):
            seconds = await engine.update_weights(as_version(model, version))
            assert 0 < seconds["weights/load_seconds"] < seconds["weights/pause_seconds"] < 5
            assert engine.version == version
            assert await engine.weight_version() == str(version)
            hits = await counted(engine, "prefix_cache_hits_total")
            for _ in range(2):  # the second finds the prompt in the cache
                for said in await engine.generate(LONG_PROMPT, 2, 8, WHOLE):
                    assert_close(said, model, LONG_PROMPT)
            assert await counted(engine, "prefix_cache_hits_total") > hits

    with_engine(play)


async def updated_while_running(engine: EngineClient, weights: Path) -> list[Generation]:
    newer = as_version(weights, 1)
    sampling = {"temperature": 1.0, "max_tokens": LENGTH, "ignore_eos": True}
    begun = await counted(engine, "generation_tokens_total")
    running = asyncio.create_task(engine.generate(LONG_PROMPT, RUNNING, 9, sampling))
    while await counted(engine, "generation_tokens_total") < begun + RUNNING * 10:
        await asyncio.sleep(0.01)
    await engine.update_weights(newer)
    return await running


def test_running_requests_go_on_under_new_weights(with_engine: WithEngine[Any], models: list[Path]) -> None:
    async def play(engine: EngineClient) -> list[Generation]:
        limiter, before = ConcurrencyLimiter(9), await engine.load()
        assert before is not None
        said = await updated_while_running(engine, models[1])
        after = await engine.load()
        assert after is not None
        assert (after.updates, after.dropped) == (before.updates + 1, RUNNING)
        assert 0 < after.preemptions - before.preemptions <= RUNNING
        for load in (before, after):
            limiter.update(load, 9)
        assert limiter.limit == 9, "an update is no pressure"
        return said

    for said in with_engine(play):
        assert len(said.token_ids) == LENGTH
        given = torch.tensor(said.logprobs)
        old = (given - logprobs(models[0], LONG_PROMPT, said.token_ids)).abs() < 1e-3
        new = (given - logprobs(models[1], LONG_PROMPT, said.token_ids)).abs() < 1e-3
        # every token belongs to exactly one version, the older one first
        switch = said.versions.count(0)
        assert said.versions == [0] * switch + [1] * (LENGTH - switch)
        assert 0 < switch < LENGTH
        assert old[:switch].all()
        assert new[switch:].all()


def test_running_requests_may_keep_their_caches(server: Server, models: list[Path]) -> None:
    async def play() -> tuple[list[Generation], list[Generation]]:
        engine = EngineClient(server.socket, headers(TOKEN, RUN_NAME, 1), keep_cache=True)
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
