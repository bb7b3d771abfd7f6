"""Parses chat messages of datasets and clients into OpenAI's form, with arguments of tool calls as objects.

{"role": "assistant", "content": "…", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]}

Messages of ShareGPT (`from`, `value`), parts of a content and JSON texts in the place of objects are read too. Arrow gives each object of a
column the keys of all others, with null: keys with null are left out, at any depth.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from hpcrl.errors import DataError

Message = dict[str, Any]

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Fields of a message in which an assistant's thoughts may stand."""

SYSTEM = "system"
"""The role of a system message, and the column of its text."""

_ROLE = re.compile(r"[\w .-]+")  # templates may write it within a special token
_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "function_call": "assistant"}
_DEEPEST = 64  # templates, and what marks special tokens, go through values by recursion
_EXAMPLE = "{'role': 'user', 'content': '…'}"


def read_messages(value: Any, role: str | None = None) -> list[Message]:
    """Return chat messages.

    Args:
        value: a list of messages, or a text.
        role: of a text, which becomes one message; None: a text is refused.

    Raises:
        DataError: they are not as expected.
    """
    if role is not None and isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not value:
        wanted = "a list of chat messages" if role is None else f"text or a list of chat messages such as [{_EXAMPLE}]"
        raise DataError(f"expected {wanted}, found {value!r:.80}")
    try:
        return [_message(one) for one in value]
    except RecursionError as error:
        raise DataError("a chat message is nested too deeply") from error


def read_tools(value: Any) -> list[dict[str, Any]]:
    """Return the tools of a row or a request: a list of objects, or their JSON text; none of None and of an empty text.

    Raises:
        DataError: they are not as expected.
    """
    tools = _parsed(value, "tools") if isinstance(value, str) and value.strip() else value or []
    if isinstance(tools, dict):
        tools = [tools]
    found = [_parsed(tool, "tools") for tool in tools] if isinstance(tools, list) else [tools]
    if is_too_deep(found):
        raise DataError(f"tools: nested too deeply; expected at most {_DEEPEST} objects and lists in each other")
    if not all(isinstance(tool, dict) for tool in found):
        raise DataError(f"tools: expected a list of objects, or its JSON text, found {value!r:.80}")
    return [without_nulls(tool) for tool in found]


def with_system(messages: list[Message], row: Mapping[str, Any]) -> list[Message]:
    """Return messages behind the text of the column `system`, where a row has one and they begin with no such message."""
    system = row.get(SYSTEM)
    if not isinstance(system, str) or not system or (messages and messages[0]["role"] == SYSTEM):
        return messages
    return [{"role": SYSTEM, "content": system}, *messages]


def is_too_deep(value: Any, room: int = _DEEPEST) -> bool:
    """Return whether more than `room` objects and lists lie in each other."""
    if not isinstance(value, dict | list):
        return False
    return not room or any(is_too_deep(one, room - 1) for one in (value.values() if isinstance(value, dict) else value))


def without_nulls(value: Any) -> Any:
    """Return a value without the keys of its objects that have null."""
    if isinstance(value, dict):
        return {name: without_nulls(one) for name, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


def _message(value: Any) -> Message:
    message: Message = without_nulls(dict(value)) if isinstance(value, Mapping) else {}
    sender, content = message.pop("from", None), message.pop("value", None)
    role = message.get("role", sender)
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise DataError(
            f"expected a chat message such as {_EXAMPLE} with a role such as user, found {role!r:.80} in {value!r:.80}"
        )
    if content is not None and "content" not in message:
        if role == "function_call":
            message["tool_calls"], content = [_parsed(content, "function_call")], ""
        message["content"] = content
    message = {"role": _ROLES.get(role, role), **_with_calls(message, "role")}
    if "content" not in message and not any(message.get(name) for name in ("tool_calls", *THOUGHTS)):
        raise DataError(f"a message of {role} has no content: {value!r:.200}")
    content = message.setdefault("content", "")
    if isinstance(content, list) and all(_is_text(part) for part in content):
        message["content"] = "".join(part["text"] for part in content)
    elif not isinstance(content, str | list):
        raise DataError(f"content of a message of {role}: expected a text or a list of parts, found {content!r:.80}")
    if message.get("weight", 1) not in (0, 1):
        raise DataError(f"expected the weight 0 or 1 of a message, found {message['weight']!r:.80}")
    return message


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _with_calls(message: Message, *left_out: str) -> Message:
    """Return a message with its tool calls as objects; a list without calls is left out, since templates look only for the key."""
    calls = message.get("tool_calls") or []
    if legacy := message.get("function_call"):  # OpenAI's older form
        calls = [_parsed(legacy, "function_call")]
    calls = _parsed(calls, "tool_calls")
    if not isinstance(calls, list):
        raise DataError(f"tool_calls: expected a list, found {calls!r:.80}")
    rest = {name: one for name, one in message.items() if name not in (*left_out, "tool_calls", "function_call")}
    return {**rest, "tool_calls": [_call(call) for call in calls]} if calls else rest


def _call(value: Any) -> dict[str, Any]:
    call = _parsed(value, "tool_calls")
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(
            f"tool_calls: expected objects with a function that has a name and arguments, found {value!r:.80}"
        )
    arguments = function.get("arguments", {})
    arguments = _parsed(arguments, "arguments of a tool call") if arguments != "" else {}
    if not isinstance(arguments, dict):
        raise DataError(f"arguments of a tool call: expected an object, or its JSON text, found {arguments!r:.80}")
    if is_too_deep(arguments):
        raise DataError(
            f"arguments of a tool call: nested too deeply; expected at most {_DEEPEST} objects and lists in each other"
        )
    named = {"id": str(call["id"])} if call.get("id") else {}
    return {**named, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _parsed(value: Any, what: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{what}: expected JSON, found {value!r:.80}: {error}") from error
