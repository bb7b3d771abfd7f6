"""Agents whose worker ends in the middle: the next worker finds the turns that the agent asks for again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config import EnvironmentConfig
from hpcrl.data.cache_files import turn_files
from hpcrl.envs.base import Messages, Turn
from hpcrl.rollout.endpoint.server import serving
from hpcrl.rollout.engines.base import Engine
from hpcrl.rollout.generate import GroupGenerator
from hpcrl.rollout.generation_cache import GenerationCache
from hpcrl.rollout.group import Group
from hpcrl.rundir.layout import Run
from hpcrl.types import Prompt, Work
from tests.rollout.conftest import WithEngine
from tests.rollout.endpoint.test_endpoint import (
    CONFIG,
    PLAYED,
    TOKENIZER,
    Client,
    Plays,
    user,
    with_embedded,  # noqa: F401  a fixture
)

WORK = Work("g7", "train", Prompt("row3", [user("sort: bca")], f"{Plays.__module__}:Plays", {}, "letters"), 2, 40)
ENDS = 2


class EndedError(Exception):
    """The worker is killed."""


def by_chat(messages: Messages, client: Client, turns: int) -> Messages:
    for _ in range(turns):
        messages = [*client.say(messages), user("abc")]
    return messages


def by_responses(messages: Messages, client: Client, turns: int) -> Messages:
    """Each goes on from the one before by its name, which is another one each time."""
    before: dict[str, Any] = {}
    for _ in range(turns):
        answer = client.post("responses", input=messages, **before).json()
        before, messages = {"previous_response_id": answer["id"]}, [user("abc")]
    return messages


def by_messages(messages: Messages, client: Client, turns: int) -> Messages:
    for _ in range(turns):
        answer = client.post("messages", messages=messages, max_tokens=8).json()
        messages = [*messages, {"role": "assistant", "content": answer["content"]}, user("abc")]
    return messages


@pytest.mark.parametrize("ask", [by_chat, by_responses, by_messages])
def test_what_an_agent_asks_again_is_found(
    with_embedded: WithEngine[Any],  # noqa: F811
    tmp_path: Path,
    ask: Callable[[Messages, Client, int], Messages],
) -> None:
    run = Run(tmp_path)

    def killed(messages: Messages, client: Client) -> Turn:
        ask(messages, client, ENDS)
        raise EndedError

    def whole(messages: Messages, client: Client) -> Turn:
        ask(messages, client, ENDS + 1)
        return Turn([], 1.0, done=True)

    async def generated(engine: Engine, play: Callable[[Messages, Client], Turn], worker: str, item: Work) -> Group:
        PLAYED.append(play)
        kept = GenerationCache(run, worker, engine)
        async with serving(CONFIG, TOKENIZER, 0) as server:
            generator = GroupGenerator(engine, TOKENIZER, CONFIG, EnvironmentConfig(), server=server)
            group = await generator.generate(item, await kept.begin(item))
        kept.write()
        return group

    async def play(engine: Engine) -> tuple[Group, Group, float]:
        calm = await generated(engine, whole, "rollout-7", WORK)
        await generated(engine, killed, "rollout-0", WORK)
        left = [str(path.relative_to(run.path)) for path in turn_files(run, "rollout-0")["g7"]]
        before = await engine.tokens() or 0
        group = await generated(engine, whole, "rollout-1", replace(WORK, turns=left))
        return calm, group, (await engine.tokens() or 0) - before

    calm, group, computed = with_embedded(play)
    assert [row.token_ids.tolist() for row in group.samples] == [row.token_ids.tolist() for row in calm.samples]
    assert [row.loss_mask.tolist() for row in group.samples] == [row.loss_mask.tolist() for row in calm.samples]
    assert len(group.samples) == WORK.n_samples, "all turns of a sample are one row"
    last = sum(group.response_lengths) - group.cached_tokens
    assert 0 < last < group.cached_tokens
    assert computed <= last + WORK.n_samples
