"""Samples that a service plays: it asks the policy at the endpoint with the key that it was given, and answers with the score or posts it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from hpcrl.config import EnvironmentConfig
from hpcrl.config.sections.environment import AgentConfig, AgentServiceConfig, SkyRLGymConfig
from hpcrl.envs.base import Messages, Turn
from hpcrl.rollout.endpoint.server import serving
from hpcrl.rollout.engines.base import Engine
from hpcrl.rollout.generate import GroupGenerator
from hpcrl.rollout.group import Group
from hpcrl.runtime.threads import in_thread
from hpcrl.types import Prompt, Work
from tests.envs.server import Asked, Server
from tests.envs.server import serving as listening
from tests.rollout.conftest import WithEngine
from tests.rollout.endpoint.test_endpoint import (
    CONFIG,
    TOKENIZER,
    Client,
    chosen,
    played,
    user,
    with_embedded,  # noqa: F401  a fixture
)


def ask(told: dict[str, Any], path: str, **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {told['api_key']}"}
    return httpx.post(f"{told['base_url']}/{path}", json=body, headers=headers, timeout=30)


def say(told: dict[str, Any]) -> str:
    answer = ask(told, "chat/completions", model=told["model"], messages=told["row"]["prompt"])
    return answer.raise_for_status().json()["choices"][0]["message"]["content"]


def group_of(
    with_engine: WithEngine[Any],
    service: Server,
    n: int,
    seconds: float = 60.0,
    then: Callable[[], object] = lambda: None,
) -> Group:
    """Return a group whose samples a service plays; what is to be done then finds the endpoint there."""
    gym = SkyRLGymConfig(agent=AgentConfig(service=AgentServiceConfig(url=service.url)))
    environment = EnvironmentConfig(skyrl_gym=gym, timeout_seconds=seconds)
    item = Work("g7", "train", Prompt("row3", [user("sort: bca")], "agent", {"level": 3}, "letters"), n, 40)

    async def generate(engine: Engine) -> Group:
        async with serving(CONFIG, TOKENIZER, 0) as server:
            group = await GroupGenerator(engine, TOKENIZER, CONFIG, environment, server=server).generate(item)
            await in_thread(then)
            return group

    return with_engine(generate)


def test_a_service_answers_with_the_score(with_embedded: WithEngine[Any]) -> None:  # noqa: F811
    keys = set[str]()

    def answer(asked: Asked) -> tuple[int, Any]:
        keys.add(asked.json["api_key"])
        return 200, {"reward": len(say(asked.json)) + 1, "metrics": {"level": asked.json["row"]["level"]}}

    with listening(answer) as service:
        group = group_of(with_embedded, service, 3)
    assert not group.failures
    assert len(keys) == 3
    assert group.raw_rewards == [len(text) + 1 for text in group.texts]
    assert [row.env_metrics for row in group.samples] == [{"level": 3.0}] * 3


def test_a_service_posts_the_score_when_it_is_known(with_embedded: WithEngine[Any]) -> None:  # noqa: F811
    """A score is taken once; another's key scores nothing here."""
    statuses = dict[str, int]()

    def play(told: dict[str, Any]) -> None:
        text = say(told)
        statuses["no score"] = ask(told, "score", reward="much").status_code
        statuses["a stranger's"] = ask({**told, "api_key": "sk-nobodys"}, "score", reward=9.0).status_code
        statuses["taken"] = ask(told, "score", reward=len(text) + 1.0).status_code
        late = ask(told, "score", reward=7.0)  # the sample may be over meanwhile
        assert (late.status_code, late.json()["error"]["code"]) in {(409, "scored"), (401, "session_ended")}

    def answer(asked: Asked) -> tuple[int, Any]:
        thread = threading.Thread(target=play, args=[asked.json])
        threads.append(thread)
        thread.start()
        return 202, {}

    threads = list[threading.Thread]()
    with listening(answer) as service:
        group = group_of(with_embedded, service, 2, then=lambda: [thread.join() for thread in threads])
    assert not group.failures
    assert statuses == {"no score": 400, "a stranger's": 401, "taken": 200}
    assert group.raw_rewards == [len(text) + 1 for text in group.texts]


def test_a_session_expires(with_embedded: WithEngine[Any]) -> None:  # noqa: F811
    """A service that takes too long hears of it, its sample has failed, and the key says that it is over."""

    def expires(seconds: float) -> bool:
        told, first, over = list[dict[str, Any]](), threading.Lock(), threading.Event()
        heard = list[httpx.Response]()

        def answer(asked: Asked) -> tuple[int, Any]:
            if asked.method == "DELETE":
                over.set()
                return 204, b""
            told.append(asked.json)
            return (202, {}) if first.acquire(blocking=False) else (200, {"reward": len(say(asked.json)) + 1})

        def then() -> None:
            over.wait(60)
            heard.extend(ask(one, path, reward=1.0) for one in told for path in ("score", "chat/completions"))

        with listening(answer) as service:
            group = group_of(with_embedded, service, 2, seconds=seconds, then=then)
        assert f"took longer than environment.timeout_seconds ({seconds:g} s)" in group.failures[0]
        assert {one["timeout_seconds"] for one in told} <= {seconds}
        assert {(one.status_code, one.json()["error"]["code"]) for one in heard} <= {(401, "session_ended")}
        return len(heard) == 4 and len(group.failures) == 1 and over.is_set()

    # where the machine has much else to do, the sample that is answered at once may take longer than 2 s
    assert any(map(expires, (2.0, 60.0)))


def test_only_a_service_scores(with_embedded: WithEngine[Any]) -> None:  # noqa: F811
    def play(messages: Messages, client: Client) -> Turn:
        refused = client.post("score", reward=9.0)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_found")
        client.say(messages)
        return Turn([], 1.0, True)

    group = played(with_embedded, play)
    assert not group.failures
    assert [len(chosen(row)) for row in group.rows[0]] == [1]


def test_the_endpoint_may_be_at_its_nodes_address(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By which the run's other servers are reached, so that a service on another node reaches it too."""
    monkeypatch.setenv("HPCRL_ADDRESS", "127.0.0.2")
    served = replace(CONFIG, inference_engine=replace(CONFIG.inference_engine, http_endpoint_host="node"))

    async def begin() -> None:
        async with serving(served, TOKENIZER, 0):
            pass

    asyncio.run(begin())
    assert "the policy answers at http://127.0.0.2:" in capsys.readouterr().out
