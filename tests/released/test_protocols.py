"""Thoughts and tool calls of released templates by Anthropic's messages and OpenAI's responses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hpcrl.envs.base import Endpoint, Messages
from tests.released import subject
from tests.released.material import FOLDER
from tests.rollout.endpoint.test_protocols import SCHEMA, by_anthropic, by_openai, check_one_row, message_of, played
from tests.rollout.test_transcript import text

pytestmark = pytest.mark.released

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 17, "b": 25}}\n</tool_call>'
R1 = "llama-cpp-deepseek-r1.jinja"
SAID = {
    "qwen3": [f"<think>\nAdd.\n</think>\n\nLet me add.\n{CALL}", "<think>\n\n</think>\n\nIt is 42.", "Bye."],
    R1: ["Add.\n</think>\n\nLet me add.", "\n</think>\n\nIt is 42.", "So.\n</think>\n\nBye."],
}


@pytest.mark.parametrize("name", SAID)
@pytest.mark.parametrize("protocol", ["messages", "responses"])
def test_a_conversation_is_one_row(name: str, protocol: str) -> None:
    """Qwen3 opens its thoughts itself, and R1's template opens them at the end of the prompt, and leaves those of the past out."""
    if not FOLDER.is_dir():
        pytest.skip(f"{FOLDER} is not there; make released installs it")
    folder, template = (FOLDER / "deepseek_v3", FOLDER / "templates" / R1) if name == R1 else (FOLDER / name, None)
    heard = list[Any]()

    def by_messages(messages: Messages, endpoint: Endpoint) -> None:
        history, tools = list[Any](messages), [{"name": "add", "input_schema": SCHEMA}] if name != R1 else []
        with by_anthropic(endpoint) as client:
            for _ in SAID[name]:
                answer = message_of(client, True, messages=history, tools=tools)
                heard.append("".join(block.text for block in answer.content if block.type == "text"))
                calls = [block for block in answer.content if block.type == "tool_use"]
                results = [
                    {"type": "tool_result", "tool_use_id": one.id, "content": str(sum(one.input.values()))}
                    for one in calls
                ]
                history += [answer.to_param(), {"role": "user", "content": results or "Thanks."}]

    def by_responses(messages: Messages, endpoint: Endpoint) -> None:
        history, tools = (
            list[Any](messages),
            [{"type": "function", "name": "add", "parameters": SCHEMA}] if name != R1 else [],
        )
        with by_openai(endpoint) as client:
            for _ in SAID[name]:
                answer = client.responses.create(model="m", input=history, tools=tools)
                heard.append(answer.output_text)
                results = [
                    {"type": "function_call_output", "call_id": one.call_id, "output": str(sum(json.loads(one.arguments).values()))}
                    for one in answer.output
                    if one.type == "function_call"
                ]  # fmt: skip
                history += [*answer.output, *(results or [{"role": "user", "content": "Thanks."}])]

    play = by_messages if protocol == "messages" else by_responses
    tokenizer = subject.tokenizer_of(folder, template)
    group, engine, _ = played(play, SAID[name], tokenizer)
    check_one_row(group, engine, tokenizer, SAID[name])
    assert heard == ["Let me add.", "It is 42.", "Bye."]
    assert text(tokenizer, engine.prompts[0]).rstrip().endswith("<think>") == (name == R1)
