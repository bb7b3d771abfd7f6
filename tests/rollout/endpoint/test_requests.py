"""What bodies of requests are taken for, and that none of them is an error of hpcrl."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hpcrl.rollout.endpoint.anthropic_messages import messages_request
from hpcrl.rollout.endpoint.openai_responses import responses_request
from hpcrl.rollout.endpoint.requests import chat_request, completion_request
from hpcrl.runtime.http_server import BadRequest

HI = {"role": "user", "content": "hi"}
ADD = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", **fields}).encode()


def nested(depth: int) -> dict[str, Any]:
    value = dict[str, Any]()
    for _ in range(depth):
        value = {"a": value}
    return value


def calling(arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


def test_messages_are_as_templates_take_them() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [ADD], "refusal": None, "audio": None},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    found = chat_request(body(messages=messages, max_completion_tokens=None, max_tokens=3, stop="x", n=2, tools=[{}]))
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert found.messages == [
        {"role": "system", "content": "ab"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    assert (found.max_tokens, found.stop, found.n, found.tools) == (3, ["x"], 2, [{}])
    assert chat_request(body(messages=[HI], tools=[{}], tool_choice="none")).tools == []
    assert completion_request(body(prompt=[[1, 2]])).prompt == [1, 2]


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": 3},
        {"messages": [3]},
        {"messages": [{"role": ["user"], "content": "hi"}]},
        {"messages": [{"role": "user", "content": 3}]},
        {"messages": [{"role": "user", "content": ["hi"]}]},
        {"messages": [{**HI, "name": 3}]},
        {"messages": [{**HI, "tool_calls": 3}]},
        {"messages": [{**HI, "tool_calls": [3]}]},
        {"messages": [{**HI, "tool_calls": [{"function": {"name": "add", "arguments": "{"}}]}]},
        {"messages": [HI], "n": 0.5},
        {"messages": [HI], "n": True},
        {"messages": [HI], "n": 1000},
        {"messages": [HI], "max_tokens": 0},
        {"messages": [HI], "stop": [""]},
        {"messages": [HI], "stop": 3},
        {"messages": [HI], "stop": ["a"] * 65},
        {"messages": [HI], "stop": "a" * 1001},
        {"messages": [HI], "n": 33},
        {"messages": [HI], "tools": [nested(900)]},
        {"messages": [HI], "tools": json.dumps([nested(900)])},
        {"messages": [HI], "tools": [[nested(900)]]},
        {"messages": [HI, calling(nested(900))]},
        {"messages": [HI, calling(json.dumps(nested(900)))]},
        {"messages": [HI], "tools": 3},
        {"messages": [HI], "tool_choice": {"type": "function"}},
        {"messages": [HI], "response_format": {"type": "json_object"}},
        {"messages": [HI], "top_logprobs": 2},
        {"messages": [HI], "model": None},
    ],
)
def test_a_chat_that_is_not_as_expected(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        chat_request(body(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prompt": ""},
        {"prompt": ["a", "b"]},
        {"prompt": [1.5]},
        {"prompt": "a", "logprobs": "all"},
        {"prompt": "a", "echo": True},
    ],
)
def test_a_completion_that_is_not_as_expected(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        completion_request(body(**fields))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        body(messages=[HI], x=[[]] * 600_000),
        b'{"a": "\\uDfff"}',
        body(messages=[HI], stop="a").replace(b'"a"', b'"\xed\xa0\x80"'),
        body(messages=[HI]).decode().encode("utf-16"),
        body(messages=[HI], stop="\ud800").decode("unicode_escape").encode("utf-16", "surrogatepass"),
    ],
)
def test_what_is_no_object(content: bytes) -> None:
    with pytest.raises(BadRequest):
        chat_request(content)


ADDS = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CONVERSATION = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi there"},
    {"role": "assistant", "content": "so", "reasoning_content": "hm", "tool_calls": [{"id": "1", **ADDS}, {"id": "2", **ADDS}]},
    {"role": "tool", "content": "3", "tool_call_id": "1"},
    {"role": "tool", "content": "no", "tool_call_id": "2"},
    {"role": "user", "content": "and?"},
]  # fmt: skip


def test_messages_of_anthropic_are_chat_messages() -> None:
    use = {"type": "tool_use", "name": "add", "input": {"a": 1}}
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "x"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "so", "citations": None},
        *({**use, "id": name} for name in "12"),
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "3"}]},
        {"type": "tool_result", "tool_use_id": "2", "content": "no", "is_error": True},
    ]
    parts = [{"type": "text", "text": one, "cache_control": {"type": "ephemeral"}} for one in ("hi ", "there")]
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": [*results, {"type": "text", "text": "and?"}]},
    ]
    schema = {"type": "object"}
    found = messages_request(
        body(messages=messages, system="be brief", max_tokens=3, stop_sequences=["x"], stream=True,
             tools=[{"name": "add", "input_schema": schema}], tool_choice={"type": "auto"})
    )  # fmt: skip
    assert found.messages == CONVERSATION
    assert (found.max_tokens, found.stop, found.n, found.stream) == (3, ["x"], 1, True)
    assert found.tools == [{"type": "function", "function": {"name": "add", "parameters": schema}}]


def test_items_of_responses_are_chat_messages() -> None:
    call = {"type": "function_call", "name": "add", "arguments": '{"a": 1}'}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": one} for one in ("hi ", "there")]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}], "encrypted_content": None},
        {"type": "message", "role": "assistant", "id": "m", "content": [{"type": "output_text", "text": "so"}]},
        *({**call, "call_id": name} for name in "12"),
        {"type": "function_call_output", "call_id": "1", "output": "3"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "no"}]},
        {"type": "message", "role": "user", "content": "and?"},
    ]  # fmt: skip
    found = responses_request(body(input=items, instructions="be brief", max_output_tokens=3, store=False))
    assert found.messages == CONVERSATION
    assert (found.max_tokens, found.instructions) == (3, 1)
    answers = [*items[1:3], *items[1:4], items[3], items[2], items[2]]
    roles = responses_request(body(input=[items[0], *answers])).messages or []
    assert [len(one.get("tool_calls", [])) for one in roles] == [0, 0, 2, 0, 0]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"messages": [3]},
        {"messages": [HI, {"role": "assistant", "content": "a"}]},
        {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
        {"messages": [{"role": "user", "content": ["hi"]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "thinking"}]}, HI]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": 3}]}, HI]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": 3}]}]},
        {"messages": [HI], "system": 3},
        {"messages": [HI], "system": [3]},
        {"messages": [HI], "tools": 3},
        {"messages": [HI], "tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"messages": [HI], "tools": [{"name": "add", "input_schema": nested(900)}]},
        {"messages": [HI], "tool_choice": {"type": "any"}},
        {"messages": [HI], "output_config": {"format": {"type": "json_schema"}}},
        {"messages": [HI], "stop_sequences": [""]},
        {"messages": [HI], "max_tokens": 0},
        {"messages": [HI], "model": None},
    ],
)
def test_a_request_of_anthropic_that_is_not_as_expected(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        messages_request(body(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"input": [3]},
        {"input": 3},
        {"input": [{"type": "item_reference", "id": "m"}]},
        {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
        {"input": [{"type": "reasoning", "content": [3]}, HI]},
        {"input": [{"type": "function_call", "name": "add", "arguments": "{"}, HI]},
        {"input": [{"type": "function_call_output", "output": 3}]},
        {"input": "hi", "instructions": 3},
        {"input": "hi", "previous_response_id": 3},
        {"input": "hi", "tools": [{"type": "web_search"}]},
        {"input": "hi", "tool_choice": "required"},
        {"input": "hi", "text": {"format": {"type": "json_object"}}},
        {"input": "hi", "top_logprobs": 3},
        {"input": "hi", "include": ["message.output_text.logprobs"]},
        {"input": "hi", "conversation": "c"},
        {"input": "hi", "background": True},
    ],
)
def test_a_request_of_responses_that_is_not_as_expected(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        responses_request(body(**fields))
