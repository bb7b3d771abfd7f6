"""Reads tool calls in the form of Hermes and Qwen models: an object with name and arguments between <tool_call> and </tool_call>."""

from __future__ import annotations

import json
from typing import Any

from hpcrl.envs.rewards.answers import after_thought

_BEGIN, _END = "<tool_call>", "</tool_call>"


class CallError(ValueError):
    """A tool call cannot be read, or asks for what there is not."""


def first_call(text: str) -> str | None:
    """Return the content of the first <tool_call> behind </think>, to the end of the text if it is not closed; None where there is none."""
    _, found, rest = after_thought(text).partition(_BEGIN)
    return rest.partition(_END)[0] if found else None


def read_call(call: str, most: int) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments of a tool call.

    Args:
        most: characters that it may have.

    Raises:
        CallError: it is longer, no JSON, or has no name and no object of arguments.
    """
    if len(call) > most:
        raise CallError(f"a call of more than {most} characters")
    try:
        content = json.loads(call)
    except (ValueError, RecursionError) as error:
        raise CallError("the call is not JSON") from error
    name, arguments = (content.get("name"), content.get("arguments", {})) if isinstance(content, dict) else (None, None)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise CallError('expected {"name": "…", "arguments": {…}}')
    return name, arguments
