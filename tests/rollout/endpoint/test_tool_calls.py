"""Tool calls: what the policy says of them, what a client is told, and that a conversation goes on from the tokens of it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from hpcrl.config import EnvironmentConfig, GeneratorConfig, InferenceEngineConfig
from hpcrl.envs.base import AgentEnvironment, Endpoint, Messages, Turn
from hpcrl.rollout.endpoint.server import serving
from hpcrl.rollout.endpoint.tool_calls import tool_calls
from hpcrl.rollout.generate import GroupGenerator
from hpcrl.types import Prompt, Work
from tests.rollout.test_transcript import Script, chosen, ended, text, tokenizer_of, user

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
ADD = {"name": "add", "arguments": {"a": 1, "b": 2}}


DEEP = '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 900 + "]" * 900 + "}}</tool_call>"


@pytest.mark.parametrize(
    ("said", "content", "calls"),
    [
        (f"so {CALL}", "so", [ADD]),
        (f"{CALL}\n{CALL}", "", [ADD, ADD]),
        ('<tool_call>{"name": "now"}</tool_call>', "", [{"name": "now", "arguments": {}}]),
        ("no call", "no call", []),
        (f"{CALL} <tool_call>nonsense</tool_call>", None, []),
        ('<tool_call>{"name": 3}</tool_call>', None, []),
        ('<tool_call>{"name": "\\ud800"}</tool_call>', None, []),
        ('<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>', None, []),
        ('<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', None, []),
        ('<tool_call>{"name": "add", "arguments": "1 2"}</tool_call>', None, []),
        ("<tool_call>[" + "[" * 5000 + "</tool_call>", None, []),
        ('<tool_call>{"name": "add"}', None, []),
        (DEEP, None, []),
    ],
)
def test_calls_are_read_or_left_in_the_text(said: str, content: str | None, calls: list[Any]) -> None:
    tokenizer = tokenizer_of("chatml")
    found = tool_calls(tokenizer, [], tokenizer.encode(said), said, TOOLS)
    assert found == (said if content is None else content, calls)


def test_a_response_template_says_how_calls_are_written() -> None:
    tokenizer = tokenizer_of("chatml")
    tokenizer.response_template = {
        "version": 1,
        "start_anchor": "<|im_start|>assistant\n",
        "defaults": {"role": "assistant"},
        "fields": {
            "content": {"close": ["[CALL]", "<|im_end|>"], "content": "text"},
            "tool_calls": {
                "open": "[CALL]",
                "close": "[/CALL]",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
        },
    }
    prompt = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    said = 'so [CALL]{"name": "add", "arguments": {"a": 1, "b": 2}}[/CALL]'
    ids, _ = ended(tokenizer, said)
    assert tool_calls(tokenizer, prompt, ids, said, TOOLS)[1] == [ADD]
    ids, _ = ended(tokenizer, "so [CALL]{oh[/CALL]")
    assert tool_calls(tokenizer, prompt, ids, "so [CALL]{oh[/CALL]", TOOLS) == ("so [CALL]{oh[/CALL]", [])


def joined(events: str) -> dict[str, Any]:
    """Return the choice that events are of; no piece of its text has anything of a call."""
    lines = [line.removeprefix("data: ") for line in events.splitlines() if line.startswith("data: {")]
    choices = [json.loads(line)["choices"][0] for line in lines]
    deltas = [choice["delta"] for choice in choices]
    texts = [delta.get("content", "") for delta in deltas]
    assert not any("<" in text for text in texts)
    message: dict[str, Any] = {"role": deltas[0]["role"], "content": "".join(texts)}
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call.pop("index") for call in calls] == list(range(len(calls)))
    return {
        "message": {**message, **({"tool_calls": calls} if calls else {})},
        "finish_reason": choices[-1]["finish_reason"],
    }


class Adds(AgentEnvironment):
    """Lets the policy call a tool, and tells it what came out."""

    def __init__(self, extras: Any) -> None:
        self._told, self._streams = extras["told"], extras["streams"]

    def play(self, messages: Messages, endpoint: Endpoint) -> Turn:
        headers = {"authorization": f"Bearer {endpoint.key}"}

        def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
            body = {"model": endpoint.model, "messages": messages, "tools": TOOLS, "stream": self._streams}
            answer = httpx.post(f"{endpoint.base_url}/chat/completions", json=body, headers=headers)
            choice = joined(answer.text) if self._streams else answer.json()["choices"][0]
            self._told.append(choice)
            return choice["message"]

        called = ask(messages)
        (call,) = called["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        result = {"role": "tool", "tool_call_id": call["id"], "content": str(sum(arguments.values()))}
        ask([*messages, called, result])
        return Turn([], 1.0, True)


@pytest.mark.parametrize("streams", [False, True])
def test_a_tool_is_called_and_its_result_follows_the_tokens_of_the_call(streams: bool) -> None:
    tokenizer = tokenizer_of("chatml")
    tokenizer.chat_template = "{%- if tools -%}{{ tools | tojson }}{%- endif -%}" + tokenizer.chat_template
    engine, told = Script([ended(tokenizer, f"so {CALL}"), ended(tokenizer, "3")]), list[dict[str, Any]]()
    served = InferenceEngineConfig(enable_http_endpoint=True, served_model_name="m")
    config = GeneratorConfig(max_turns=3, max_input_length=4000, inference_engine=served)
    work = Work(
        "g", "train", Prompt("0", user("add"), f"{__name__}:Adds", {"told": told, "streams": streams}), 1, seed=5
    )

    async def play() -> Any:
        async with serving(config, tokenizer, 0) as server:
            return await GroupGenerator(engine, tokenizer, config, EnvironmentConfig(), server=server).generate(work)  # type: ignore[arg-type]

    group = asyncio.run(play())
    assert not group.failures
    assert [one["finish_reason"] for one in told] == ["tool_calls", "stop"]
    ((row,),) = group.rows
    assert text(tokenizer, row.token_ids.tolist()).startswith(json.dumps(TOOLS)[:20])
    assert engine.prompts[1][: len(engine.prompts[0])] == engine.prompts[0]
    assert text(tokenizer, engine.prompts[1]).endswith(
        f"so {CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert text(tokenizer, chosen(row)) == f"so {CALL}<|im_end|>3<|im_end|>"
    assert [one["role"] for one in group.conversations[0]] == ["assistant", "tool", "assistant"]
