"""Whatever programs send: it is answered or refused, the engine lives, and other samples go on."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any

import httpx
import pytest

from hpcrl.config import EnvironmentConfig, GeneratorConfig, InferenceEngineConfig, SamplingParams
from hpcrl.config.sections.generator import EvalSamplingParams
from hpcrl.envs.base import Endpoint, Messages, Turn
from hpcrl.errors import DataError, RefusedRequestError
from hpcrl.rollout.endpoint import server as server_module
from hpcrl.rollout.endpoint.server import PolicyServer, serving
from hpcrl.rollout.engines.base import Engine, engine_sampling
from hpcrl.rollout.generate import GroupGenerator
from hpcrl.rollout.generation_cache import GroupCache
from hpcrl.rollout.group import Group
from hpcrl.runtime.http_server import BadRequest
from hpcrl.types import Prompt, Work
from tests.rollout.conftest import WithEngine
from tests.rollout.endpoint.odd_requests import PATHS, odd_request
from tests.rollout.endpoint.test_endpoint import CONFIG, TOKENIZER, Client, played, user
from tests.rollout.material import MAX_MODEL_LEN, VOCABULARY

MANY = int(os.environ.get("HPCRL_FUZZ_REQUESTS", "10000"))
FEW = 300
_AT_ONCE, _OF_A_KEY = 8, 50
_TRIES = replace(CONFIG, max_turns=10**6)


async def send_many(engine: Engine, count: int, seed: str) -> Counter[tuple[int, str]]:
    """Send odd requests while other samples ask as ordinary programs do; return how often each status and code was answered."""
    cache, answers, refusals, left = (
        GroupCache(engine, "g7"),
        Counter[tuple[int, str]](),
        Counter[str](),
        iter(range(count)),
    )
    sampling = engine_sampling(_TRIES.sampling_params, "train", VOCABULARY)

    async def say(turn: int, prompt: Any, limits: Any, heard: Any) -> Any:
        (said,) = await cache.generate(0, turn, prompt.token_ids, 1, turn, {**sampling, **limits}, heard)
        return said

    async def ask(http: httpx.AsyncClient, endpoint: Endpoint, path: str, body: bytes) -> httpx.Response:
        headers = {"authorization": f"Bearer {endpoint.key}"}
        return await http.post(f"{endpoint.base_url}/{path}", content=body, headers=headers)

    async def send(http: httpx.AsyncClient, server: PolicyServer) -> None:
        """Send a few with each key, which ends where the engine refuses one."""
        while few := list(islice(left, _OF_A_KEY)):
            while few:
                async with server.session(say, _TRIES.sampling_params) as (session, endpoint):
                    while few and not session.ended.is_set():
                        path, body = odd_request(f"{seed}-{few[0]}")
                        answer = await ask(http, endpoint, path, body)
                        assert answer.status_code in (200, 400, 404), (few[0], answer.text)
                        code = answer.json()["error"]["code"] if answer.status_code != 200 else ""
                        answers[answer.status_code, code] += 1
                        refusals.update([str(session.failure)] if session.failure else [])
                        del few[0]

    async def go_on(http: httpx.AsyncClient, server: PolicyServer, done: asyncio.Event) -> int:
        asked = 0
        body = b'{"model": "policy", "messages": [{"role": "user", "content": "sort: bca"}]}'
        async with server.session(say, _TRIES.sampling_params) as (_, endpoint):
            while not done.is_set():
                answer = await ask(http, endpoint, "chat/completions", body)
                assert answer.status_code == 200, answer.text
                asked += 1
                await asyncio.sleep(0.05)
        return asked

    done = asyncio.Event()
    async with serving(_TRIES, TOKENIZER, 0) as server, httpx.AsyncClient(timeout=120) as http:
        assert server is not None
        honest = asyncio.create_task(go_on(http, server, done))
        await asyncio.gather(*(send(http, server) for _ in range(_AT_ONCE)))
        done.set()
        assert await honest > 0
    assert await engine.healthy()
    print(f"refused by the engine: {dict(refusals)}", flush=True)
    return answers


def check_many(with_engine: WithEngine[Any], count: int, seed: str) -> None:
    began = time.monotonic()
    answers = with_engine(lambda engine: send_many(engine, count, seed))
    print(f"{count} requests in {time.monotonic() - began:.0f} s by status and code: {dict(answers)}", flush=True)
    assert answers.total() == count
    assert answers[200, ""] > count / 10, "hardly any of them was answered"


def test_odd_bodies_are_read_or_refused() -> None:
    """Whatever their protocol: another exception would be an error of hpcrl itself."""
    read = Counter[str]()
    for number in range(3000):
        path, body = odd_request(f"read-{number}")
        with suppress(BadRequest, DataError):
            server_module._PROTOCOLS[f"/v1/{path.removesuffix('/count_tokens')}"].parse(body)
            read[path] += 1
    assert set(read) == set(PATHS)


def test_some_odd_requests(with_engine: WithEngine[Any]) -> None:
    check_many(with_engine, FEW, "a few")


@pytest.mark.fuzz
def test_many_odd_requests(with_engine: WithEngine[Any]) -> None:
    check_many(with_engine, MANY, os.environ.get("HPCRL_FUZZ_SEED") or str(time.time()))


def test_a_sample_whose_request_the_engine_refuses_fails_alone(with_each_engine: WithEngine[Any]) -> None:
    """It is longer than the engine takes, where no setting says so; a further request of the sample hears that it is over."""
    heard = list[tuple[int, str]]()

    def play(messages: Messages, client: Client) -> Turn:
        if heard:
            client.say(messages)
            return Turn([], 1.0, True)
        for asked in ([user("abc" * MAX_MODEL_LEN)], messages):
            answer = client.post(messages=asked)
            heard.append((answer.status_code, answer.json()["error"]["code"]))
        assert client.endpoint.ended.is_set()
        return Turn([], 1.0, True)

    one_by_one = replace(CONFIG, max_input_length=None)
    first = played(with_each_engine, play, one_by_one)
    assert heard == [(400, "invalid_request"), (401, "session_ended")]
    assert len(first.failures) == 1
    assert str(MAX_MODEL_LEN) in first.failures[0]
    assert [row.stop_reason for row in first.samples] == ["failed"]
    assert not played(with_each_engine, play, one_by_one).failures


@pytest.mark.parametrize("kind", ["train", "eval"])
def test_settings_that_the_engine_refuses_fail_each_sample(with_each_engine: WithEngine[Any], kind: Any) -> None:
    """So a run ends by environment.max_failed_ratio, with the engine's reason, instead of starting replicas again."""
    params = SamplingParams(max_generate_length=8, additional_kwargs={"min_tokens": -3, "bad_words": [""]})
    config = GeneratorConfig(sampling_params=params, eval_sampling_params=EvalSamplingParams(max_generate_length=8, additional_kwargs=params.additional_kwargs), inference_engine=InferenceEngineConfig(backend="transformers"))  # fmt: skip

    async def generate(engine: Engine) -> Group:
        item = Work("g7", kind, Prompt("row3", [user("sort: bca")], "gsm8k", {"reward_spec": {"ground_truth": "1"}}, "a"), 2, 40)  # fmt: skip
        return await GroupGenerator(engine, TOKENIZER, config, EnvironmentConfig()).generate(item)

    group = with_each_engine(generate)
    assert len(group.failures) == 2
    assert all("min_tokens" in failure or "bad_words" in failure for failure in group.failures)
    assert [row.stop_reason for row in group.samples] == ["failed"] * 2


def test_half_a_character_is_no_fault_of_the_engine(with_engine: WithEngine[Any]) -> None:
    """The embedded engine takes it for a text that never comes."""

    async def play(engine: Engine) -> None:
        for heard in (None, lambda *_: None):
            with pytest.raises(RefusedRequestError, match="surrogates"):
                await engine.generate([5], 1, 0, {"max_tokens": 2, "stop": ["\ud800"]}, heard=heard)

    with_engine(play)
