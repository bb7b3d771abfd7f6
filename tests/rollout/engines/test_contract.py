"""What each engine does: tokens in, tokens and logprobs out, checked against transformers; new weights under idle and running engines."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcrl.errors import RefusedRequestError
from hpcrl.rollout.engines.base import Engine, Generation
from hpcrl.rollout.limiter import ConcurrencyLimiter
from tests.rollout.conftest import WithEngine
from tests.rollout.material import (
    BATCHED_TOKENS,
    EOS,
    LONG_PROMPT,
    MAX_MODEL_LEN,
    PROMPT,
    VOCABULARY,
    as_version,
    close,
    logprobs,
    slowly,
)

WHOLE: dict[str, Any] = {"temperature": 1.0, "max_tokens": 24}
RUNNING, LENGTH = 16, 300  # samples that an update meets


def assert_close(said: Generation, model: Path, prompt: list[int], temperature: float = 1.0) -> None:
    expected = logprobs(model, prompt, said.token_ids, temperature)
    assert close(torch.tensor(said.logprobs), expected)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_transformers(
    with_each_engine: WithEngine[Any], models: list[Path], temperature: float
) -> None:
    sampling = {**WHOLE, "temperature": temperature}
    for said in with_each_engine(lambda engine: engine.generate(PROMPT, 4, 3, sampling)):
        assert_close(said, models[0], PROMPT, temperature)


def test_seeds_reproduce(with_each_engine: WithEngine[Any]) -> None:
    async def play(engine: Engine) -> None:
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

    with_each_engine(play)


def test_more_prompts_than_a_batch_has_room_for(with_each_engine: WithEngine[Any]) -> None:
    prompts = [
        [4 + number % 13, 4 + number // 13, *LONG_PROMPT] for number in range(2 * BATCHED_TOKENS // len(LONG_PROMPT))
    ]

    async def play(engine: Engine) -> None:
        said = await asyncio.gather(*(engine.generate(prompt, 1, 3, WHOLE) for prompt in prompts))
        for number in (0, -1):
            (alone,) = await engine.generate(prompts[number], 1, 3, WHOLE)
            assert said[number][0].token_ids == alone.token_ids

    with_each_engine(play)


def test_a_response_ends_with_its_end_token(with_each_engine: WithEngine[Any]) -> None:
    sampling = {"temperature": 1.0, "max_tokens": 200}
    said = with_each_engine(lambda engine: engine.generate(PROMPT, 32, 5, sampling))
    stopped = [generation for generation in said if generation.stop_reason == "stop"]
    assert stopped
    for generation in stopped:
        assert generation.token_ids[-1] == EOS
        assert EOS not in generation.token_ids[:-1]
    assert all(len(g.token_ids) == len(g.logprobs) for g in said)


def test_sampling_options_reach_the_engine(with_each_engine: WithEngine[Any]) -> None:
    async def ids(engine: Engine, **options: Any) -> list[list[int]]:
        said = await engine.generate(PROMPT, 8, 21, {**WHOLE, "ignore_eos": True, **options})
        return [generation.token_ids for generation in said]

    async def play(engine: Engine) -> None:
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

    with_each_engine(play)


def test_stop_strings_end_a_response(with_each_engine: WithEngine[Any]) -> None:
    async def play(engine: Engine) -> None:
        # so hot that a letter comes soon of any model, in any number type
        letters = {"temperature": 2.0, "max_tokens": 600, "ignore_eos": True, "seed": None}
        (plain,) = await engine.generate(PROMPT, 1, 2, {**letters, "max_tokens": 100})
        assert plain.stop_reason == "length"
        stops = await engine.generate(PROMPT, 8, 2, {**letters, "stop": ["c"]})
        assert {said.stop_reason for said in stops} == {"stop"}
        assert len({said.token_ids[-1] for said in stops}) == 1
        assert all(said.token_ids[-1] not in said.token_ids[:-1] for said in stops)

    with_each_engine(play)


def test_tokens_that_a_request_names_end_a_response(with_each_engine: WithEngine[Any]) -> None:
    async def play(engine: Engine) -> None:
        letters = {**WHOLE, "max_tokens": 100, "ignore_eos": True}
        (plain,) = await engine.generate(PROMPT, 1, 2, letters)
        end = plain.token_ids[5]
        for said in await engine.generate(PROMPT, 4, 2, {**letters, "stop_token_ids": [end]}):
            assert (said.stop_reason, said.token_ids.index(end)) == ("stop", len(said.token_ids) - 1)
        both = await engine.generate(
            PROMPT, 4, 2, {**letters, "ignore_eos": False, "stop_token_ids": [end], "min_tokens": 9}
        )
        assert {said.token_ids[-1] for said in both} <= {end, EOS}
        assert all(len(said.token_ids) >= 9 for said in both)

    with_each_engine(play)


def test_ends_of_one_request_are_tokens_of_another(with_each_engine: WithEngine[Any]) -> None:
    """Also while the other one may not end yet."""

    async def play(engine: Engine) -> None:
        longer = {**WHOLE, "max_tokens": 40, "ignore_eos": True, "min_tokens": 40}
        (alone,) = await engine.generate(PROMPT, 1, 2, longer)
        ends = {**longer, "min_tokens": 0, "stop_token_ids": sorted({*alone.token_ids} - {EOS})[:2]}
        (said,), _ = await asyncio.gather(engine.generate(PROMPT, 1, 2, longer), engine.generate(PROMPT, 8, 50, ends))
        assert said.token_ids == alone.token_ids

    with_each_engine(play)


def test_a_refused_request_has_the_reason_and_others_are_answered(with_each_engine: WithEngine[Any]) -> None:
    async def play(engine: Engine) -> None:
        going_on = asyncio.create_task(engine.generate(PROMPT, 1, 2, {**WHOLE, "max_tokens": 60, "ignore_eos": True}))
        for heard in (None, lambda *_: None):
            for prompt, sampling, why in (
                ([4] * (MAX_MODEL_LEN + 1), WHOLE, str(MAX_MODEL_LEN)),
                ([VOCABULARY + 3], WHOLE, "token id|vocab"),
                (PROMPT, {"top_p": 7.0}, "top_p"),
                (PROMPT, {"logit_bias": {str(VOCABULARY + 3): 1.0}}, "logit_bias"),
                (PROMPT, {"allowed_token_ids": [VOCABULARY + 3]}, "token_id"),
                (PROMPT, {"stop_token_ids": [VOCABULARY + 3], "min_tokens": 2}, "stop_token_ids"),
            ):
                with pytest.raises(RefusedRequestError, match=why):
                    await engine.generate(prompt, 1, 0, sampling, heard=heard)
        (said,) = await going_on
        assert len(said.token_ids) == 60
        assert await engine.healthy()

    with_each_engine(play)


def test_new_weights_answer_the_same_prompt(with_each_engine: WithEngine[Any], models: list[Path]) -> None:
    async def play(engine: Engine) -> None:
        for version, model in enumerate([models[0], models[1], models[2], models[0]]):
            seconds = await engine.update_weights(as_version(model, version))
            assert 0 < seconds["weights/load_seconds"] < seconds["weights/pause_seconds"] < 5
            assert engine.version == version
            for _ in range(2):  # the second may find the prompt in a cache
                for said in await engine.generate(LONG_PROMPT, 2, 8, WHOLE):
                    assert_close(said, model, LONG_PROMPT)

    with_each_engine(play)


@pytest.mark.parametrize("samples", [1, 3, 8, 257])
def test_decoding_follows_new_weights(with_each_engine: WithEngine[Any], models: list[Path], samples: int) -> None:
    """Of an unrelated model, at sizes of a batch that CUDA graphs pad differently: only prefill would show less."""

    sampling = {**WHOLE, "max_tokens": 16, "ignore_eos": True}

    async def decoded(engine: Engine) -> list[Generation]:
        # vLLM refuses more samples in a request than it runs at a time
        counts = [min(64, samples - begin) for begin in range(0, samples, 64)]
        found = await asyncio.gather(
            *(engine.generate(PROMPT, count, 64 * at, sampling) for at, count in enumerate(counts))
        )
        return [said for several in found for said in several]

    async def play(engine: Engine) -> None:
        await decoded(engine)
        await engine.update_weights(as_version(models[1], 1))
        said = await decoded(engine)
        assert len(said) == samples
        for generation in said:
            assert_close(generation, models[1], PROMPT)

    with_each_engine(play)


def test_an_engine_that_has_slept_wakes_with_new_weights(with_each_engine: WithEngine[Any], models: list[Path]) -> None:
    async def play(engine: Engine) -> None:
        for version, model in enumerate([models[1], models[2]], 1):
            await engine.generate(LONG_PROMPT, 2, 8, WHOLE)
            await engine.sleep()
            assert not engine.waiting
            seconds = await engine.update_weights(as_version(model, version))
            assert 0 < seconds["weights/wake_seconds"] < seconds["weights/pause_seconds"]
            for said in await engine.generate(LONG_PROMPT, 2, 8, WHOLE):
                assert_close(said, model, LONG_PROMPT)
        assert "weights/wake_seconds" not in await engine.update_weights(as_version(models[0], 3))

    with_each_engine(play)


async def updated_while_running(engine: Engine, weights: Path, *, sleeps: bool = False) -> list[Generation]:
    newer = as_version(weights, 1)
    sampling = {"temperature": 1.0, "max_tokens": LENGTH, "ignore_eos": True}
    begun = await engine.tokens() or 0
    with slowly(weights):
        running = asyncio.create_task(engine.generate(LONG_PROMPT, RUNNING, 9, sampling))
        while (await engine.tokens() or 0) < begun + RUNNING * 10:
            await asyncio.sleep(0.01)
        if sleeps:
            await asleep(engine, running)
        await engine.update_weights(newer)
    return await running


async def asleep(engine: Engine, running: asyncio.Task[list[Generation]]) -> None:
    """Let the engine sleep, and check that meanwhile nothing is generated and that further calls wait."""
    await engine.sleep()
    assert engine.asleep
    later = asyncio.create_task(engine.generate(PROMPT, 1, 4, WHOLE))
    before = await engine.tokens()
    await asyncio.sleep(0.5)
    assert await engine.tokens() == before
    assert not running.done()
    assert not later.done()
    later.cancel()


def test_requests_that_sleep_interrupts_go_on_under_the_weights_that_come_next(
    with_each_engine: WithEngine[Any], models: list[Path]
) -> None:
    async def play(engine: Engine) -> list[Generation]:
        limiter = ConcurrencyLimiter(9)
        before = await engine.load()
        said = await updated_while_running(engine, models[1], sleeps=True)
        after = await engine.load()
        for load in (before, after):
            assert load is not None
            limiter.update(load, 9)
        assert limiter.limit == 9, "the preemptions of a sleep are no pressure"
        assert not engine.asleep
        return said

    for said in with_each_engine(play):
        assert_switched(said, models)


def test_an_engine_wakes_with_the_version_that_it_had(with_each_engine: WithEngine[Any], models: list[Path]) -> None:
    async def play(engine: Engine) -> None:
        await engine.update_weights(as_version(models[1], 1))
        sampling = {**WHOLE, "max_tokens": LENGTH, "ignore_eos": True}
        with slowly(models[1]):
            begun = await engine.tokens() or 0
            running = asyncio.create_task(engine.generate(LONG_PROMPT, 4, 9, sampling))
            while (await engine.tokens() or 0) < begun + 4:
                await asyncio.sleep(0.01)
            await engine.sleep()
            assert not running.done()
            await engine.update_weights(as_version(models[1], 1))
        for said in await running:
            assert set(said.versions) == {1}
            assert_close(said, models[1], LONG_PROMPT)

    with_each_engine(play)


def test_running_requests_go_on_under_new_weights(with_each_engine: WithEngine[Any], models: list[Path]) -> None:
    async def play(engine: Engine) -> list[Generation]:
        limiter, before = ConcurrencyLimiter(9), await engine.load()
        assert before is not None
        said = await updated_while_running(engine, models[1])
        after = await engine.load()
        assert after is not None
        for load in (before, after):
            limiter.update(load, 9)
        assert limiter.limit == 9, "an update is no pressure"
        return said

    for said in with_each_engine(play):
        assert_switched(said, models)


def assert_switched(said: Generation, models: list[Path]) -> None:
    """Every token belongs to exactly one version, the older one first."""
    assert len(said.token_ids) == LENGTH
    given = torch.tensor(said.logprobs)
    old, new = (logprobs(model, LONG_PROMPT, said.token_ids) for model in models[:2])
    switch = said.versions.count(0)
    assert said.versions == [0] * switch + [1] * (LENGTH - switch)
    assert 0 < switch < LENGTH
    assert close(given[:switch], old[:switch])
    assert close(given[switch:], new[switch:])
    assert not close(given[switch:], old[switch:])


@pytest.mark.parametrize("options", [{}, {"top_k": 3, "logprobs": 3}, {"stop": ["bc"]}])
def test_tokens_are_heard_as_they_come(with_each_engine: WithEngine[Any], options: dict[str, Any]) -> None:
    """Piece by piece, with the log-probabilities of the end, and the response is the one that nobody hears."""
    pieces = list[tuple[list[int], list[float]]]()
    # so long that not even a busy server hands all of it over at once
    sampling = {**WHOLE, "max_tokens": 200, "ignore_eos": True, **options}

    async def play(engine: Engine) -> None:
        (silent,) = await engine.generate(PROMPT, 1, 4, sampling)
        (heard,) = await engine.generate(
            PROMPT, 1, 4, sampling, None, lambda ids, logprobs: pieces.append((list(ids), list(logprobs)))
        )
        assert (heard.token_ids, heard.stop_reason, heard.versions) == (
            silent.token_ids,
            silent.stop_reason,
            silent.versions,
        )
        assert heard.sampling_mask == silent.sampling_mask
        torch.testing.assert_close(heard.logprobs, silent.logprobs, atol=1e-4, rtol=0)
        assert [token for ids, _ in pieces for token in ids] == heard.token_ids
        assert [one for _, logprobs in pieces for one in logprobs] == heard.logprobs
        assert len(pieces) > 3

    with_each_engine(play)
