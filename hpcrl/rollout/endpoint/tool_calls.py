"""Finds tool calls in a response."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hpcrl.data.chat.messages import is_too_deep

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Call = dict[str, Any]
"""`name`, and `arguments` as an object."""

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


def first_of_calls(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text that a call begins with: what comes before it is content, and nothing is if it is empty."""
    return "<tool_call>" if getattr(tokenizer, "response_template", None) is None else ""


def tool_calls(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], said: Sequence[int], text: str, tools: list[Any]
) -> tuple[str, list[Call]]:
    """Return a response's text beside its tool calls, and the calls; where a call cannot be read, the whole text and none.

    A tokenizer's response template of transformers defines how its model writes calls. Otherwise calls are parsed as Hermes and
    Qwen models write them: an object with `name` and `arguments` between <tool_call> and </tool_call>.

    Args:
        prompt, said: token ids.
        text: of `said`.
        tools: as the request names them.
    """
    if getattr(tokenizer, "response_template", None) is None:
        parts = _CALL.split(text)
        found = [_read(part) for part in parts[1::2]]
        content = "".join(parts[::2]).rstrip()
    else:
        try:
            message = tokenizer.parse_response(list(said), prefix=list(prompt), tools=tools)
        except (ValueError, KeyError):  # a response that does not match the template
            return text, []
        assert isinstance(message, dict)
        found = [_checked(one.get("function")) for one in message.get("tool_calls") or []]
        content = str(message.get("content") or "")
    calls = [one for one in found if one is not None]
    return (content, calls) if calls and len(calls) == len(found) else (text, [])


def _read(text: str) -> Call | None:
    try:
        return _checked(json.loads(text))
    except (ValueError, RecursionError):
        return None


def _checked(value: Any) -> Call | None:
    name, arguments = (value.get("name"), value.get("arguments", {})) if isinstance(value, dict) else (None, None)
    readable = isinstance(name, str) and name.isprintable() and isinstance(arguments, dict)
    readable = readable and not is_too_deep(arguments) and _is_json(arguments)
    return {"name": name, "arguments": arguments} if readable else None


def _is_json(arguments: Any) -> bool:
    """Return whether other programs read the arguments: neither NaN nor half a character is JSON in UTF-8."""
    try:
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return False
    return True
