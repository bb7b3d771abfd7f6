"""What bodies of requests are taken for, and that none of them is an error of hpcrl."""

from __future__ import annotations

import json
from typing import Any

import pytest

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
