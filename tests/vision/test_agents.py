"""Agents that show images: their rows are those of an environment that shows the same, and what is kept of them is found again."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpcrl.config import EnvironmentConfig, GeneratorConfig, InferenceEngineConfig
from hpcrl.config.sections.generator import ChatTemplateConfig
from hpcrl.config.sections.model import Pretrained
from hpcrl.data.cache_files import turn_files
from hpcrl.data.tokenizer import load_tokenizer
from hpcrl.data.vision.messages import with_images
from hpcrl.data.vision.reader import ImageReader, row_images
from hpcrl.envs.base import Endpoint, Messages, Turn
from hpcrl.rollout.endpoint.server import serving
from hpcrl.rollout.engines.base import Launched
from hpcrl.rollout.generate import GroupGenerator
from hpcrl.rollout.generation_cache import GenerationCache
from hpcrl.rollout.group import Group
from hpcrl.rundir.layout import Run
from hpcrl.trainer.packing import pack
from hpcrl.types import Row, Work
from tests.rollout.endpoint.test_endpoint import PLAYED, Client, Plays
from tests.rollout.endpoint.test_protocols import by_anthropic, by_openai
from tests.rows import as_tensors
from tests.vision.material import asks, drawn, write_model
from tests.vision.test_agreement import SAMPLING, engine, model, policy_of  # noqa: F401  fixtures
from tests.vision.test_agreement import work as shown_work

TURNS = 3
SERVED = InferenceEngineConfig(enable_http_endpoint=True, served_model_name="m")
OTHER = 77  # seed of an image that no environment shows
Play = Callable[[Messages, Endpoint], None]


@pytest.fixture(
    scope="module",
    params=[("transformers", "qwen2_5_vl"), pytest.param(("vllm", "qwen2_5_vl"), marks=pytest.mark.vision)],
    ids="-".join,
)
def used(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    backend, kind = request.param
    return backend, write_model(tmp_path_factory.mktemp("agents") / kind, kind)


def generated(launched: Launched, path: Path, item: Work, run: Run | None = None, **config: Any) -> Group:
    """Return a group; turns are kept in a run's directory, where one is given."""

    async def generate() -> Group:
        pretrained, client = Pretrained(str(path)), launched.connect()
        tokenizer, reader = load_tokenizer(pretrained, ChatTemplateConfig()), ImageReader.of(pretrained)
        settings = GeneratorConfig(
            **{
                "max_turns": TURNS + 1,
                "max_input_length": 200,
                "sampling_params": SAMPLING,
                "inference_engine": SERVED,
                **config,
            }
        )
        kept = GenerationCache(run, "rollout-0", client) if run else None
        async with serving(settings, tokenizer, 0, pretrained, reader) as server:
            generator = GroupGenerator(client, tokenizer, settings, EnvironmentConfig(), server=server, reader=reader)
            group = await generator.generate(item, await kept.begin(item) if kept else None)
        if kept:
            kept.write()
        return group

    return asyncio.run(generate())


def played(launched: Launched, path: Path, play: Play, run: Run | None = None, turns: list[str] | None = None) -> Group:
    """Return the group of a prompt with an image, whose only sample a function plays."""

    def plays(messages: Messages, client: Client) -> Turn:
        play(messages, client.endpoint)
        return Turn([], 1.0, True)

    PLAYED.append(plays)
    item = replace(shown_work(1, 1, n=1, environment=f"{Plays.__module__}:Plays"), turns=turns or [])
    return generated(launched, path, item, run)


def more(turn: int, said: str) -> list[dict[str, Any]]:
    """Return the parts of what ShowMore answers to a text, as chat completions have them."""
    (message,) = asks(10 + turn, *([30 + len(said)] if turn > 1 else []), text="count: blue")
    return [as_chat(part) for part in message["content"]]


def as_chat(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] == "text":
        return part
    url = f"data:image/png;base64,{base64.b64encode(part['image']).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def other() -> dict[str, Any]:
    return as_chat({"type": "image", "image": drawn(OTHER)})


def by_chat(messages: Messages, endpoint: Endpoint) -> None:
    """Answers come in pieces."""
    with by_openai(endpoint) as client:

        def say(history: Messages) -> str:
            stream = client.chat.completions.create(model="m", messages=history, stream=True)
            return "".join(piece.choices[0].delta.content or "" for piece in stream)

        history = list(messages)
        for turn in range(1, TURNS + 1):
            said = say(history)
            before = list(history)
            history += [{"role": "assistant", "content": said}, {"role": "user", "content": more(turn, said)}]
        say([*before[:-1], {"role": "user", "content": [other()]}])


def of_anthropic(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] == "text":
        return part
    kind, _, data = part["image_url"]["url"].removeprefix("data:").partition(";base64,")
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}


def by_messages(messages: Messages, endpoint: Endpoint) -> None:
    """The last one is the result of a tool, which is an image."""
    with by_anthropic(endpoint) as client:

        def say(history: Messages) -> str:
            said = client.messages.create(model="m", max_tokens=1000, messages=history)
            return "".join(block.text for block in said.content)

        history = [{**one, "content": [of_anthropic(part) for part in one["content"]]} for one in messages]
        for turn in range(1, TURNS + 1):
            counted = client.messages.count_tokens(model="m", messages=history).input_tokens
            assert counted > 9 * turn
            said = say(history)
            parts = [of_anthropic(part) for part in more(turn, said)]
            history += [{"role": "assistant", "content": said}, {"role": "user", "content": parts}]
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [of_anthropic(other())]}
        say([{"role": "user", "content": [result]}])


def of_responses(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] == "text":
        return {"type": "input_text", "text": part["text"]}
    return {"type": "input_image", "detail": "auto", "image_url": part["image_url"]["url"]}


def by_responses(messages: Messages, endpoint: Endpoint) -> None:
    """Each goes on from the one before by its name; the last one is what a function returns, which is an image."""
    with by_openai(endpoint) as client:
        items: list[Any] = [{**one, "content": [of_responses(part) for part in one["content"]]} for one in messages]
        name = None
        for turn in range(1, TURNS + 1):
            answer = client.responses.create(model="m", input=items, previous_response_id=name)
            name, parts = answer.id, [of_responses(part) for part in more(turn, answer.output_text)]
            items = [{"role": "user", "content": parts}]
        returned = {"type": "function_call_output", "call_id": "call_1", "output": [of_responses(other())]}
        client.responses.create(model="m", input=[returned])


@pytest.fixture(scope="module")
def expected(engine: Launched, model: Path) -> Row[np.ndarray]:  # noqa: F811
    """The row of an environment."""
    (row,) = generated(engine, model, shown_work(1, 1, n=1), max_turns=TURNS).samples
    return row


def check_equal(row: Row[np.ndarray], expected: Row[np.ndarray]) -> None:
    for name in ("token_ids", "loss_mask", "versions"):
        assert getattr(row, name).tolist() == getattr(expected, name).tolist(), name
    np.testing.assert_allclose(row.rollout_logprobs, expected.rollout_logprobs, atol=1e-5)
    assert row.tensors.keys() == expected.tensors.keys()
    for name, array in expected.tensors.items():
        np.testing.assert_array_equal(row.tensors[name], array, err_msg=name)


@pytest.mark.parametrize("play", [by_chat, by_messages, by_responses])
def test_an_agent_shows_what_an_environment_does(
    engine: Launched,  # noqa: F811
    model: Path,  # noqa: F811
    expected: Row[np.ndarray],
    play: Play,
) -> None:
    group = played(engine, model, play)
    assert not group.failures, group.failures
    row, branch = group.rows[0]
    check_equal(row, expected)
    assert len(row_images(row.tensors)) == 4
    seen = ImageReader.of(Pretrained(str(model))).seen(with_images(asks(OTHER))[0]["content"][0]["image"])
    last = row_images(branch.tensors)[-1]
    assert all(np.array_equal(last[name], array) for name, array in seen.tensors.items() if name in last)
    assert len(row_images(branch.tensors)) == (3 if play is by_chat else 1), "a branch shows its own images"
    parts = group.conversations[0][-2]["content"]
    assert [part["type"] for part in parts] == ["image"]


def test_what_is_learned_of_an_agent_is_what_is_learned_of_an_environment(
    engine: Launched,  # noqa: F811
    model: Path,  # noqa: F811
    expected: Row[np.ndarray],
) -> None:
    rows = [as_tensors(row) for row in played(engine, model, by_chat).rows[0]]
    gradients = list[dict[str, torch.Tensor]]()
    for row in (rows[0], as_tensors(expected)):
        policy, batch = policy_of(model), pack([row]).whole()
        (policy.run(batch)[0] * batch.loss_mask).sum().backward()
        gradients.append({name: one.grad for name, one in policy.model.named_parameters() if one.grad is not None})
    assert any("visual" in name and one.any() for name, one in gradients[0].items())
    torch.testing.assert_close(*gradients, rtol=0, atol=0)
    batch = pack(rows).whole()
    trained = batch.loss_mask > 0
    said = policy_of(model).run(batch)[0]
    torch.testing.assert_close(said[trained], batch.rollout_logprobs[trained], rtol=0, atol=2e-4)


class EndedError(Exception):
    """The worker is killed."""


def test_an_agent_that_shows_the_same_again_finds_its_turns(
    engine: Launched,  # noqa: F811
    model: Path,  # noqa: F811
    expected: Row[np.ndarray],
    tmp_path: Path,
) -> None:
    """And one that shows another image does not."""
    run = Run(tmp_path)

    def killed(messages: Messages, endpoint: Endpoint) -> None:
        by_responses(messages, endpoint)
        raise EndedError

    def changed(messages: Messages, endpoint: Endpoint) -> None:
        by_chat([{**messages[0], "content": [other(), *messages[0]["content"][1:]]}], endpoint)

    assert played(engine, model, killed, run).failures
    left = [str(path.relative_to(run.path)) for path in turn_files(run, "rollout-0")["g1"]]
    group = played(engine, model, by_chat, turns=left, run=run)
    check_equal(group.rows[0][0], expected)
    assert group.cached_tokens == int(expected.loss_mask.sum())
    left = [str(path.relative_to(run.path)) for path in turn_files(run, "rollout-0")["g1"]]
    assert played(engine, model, changed, turns=left, run=run).cached_tokens == 0
