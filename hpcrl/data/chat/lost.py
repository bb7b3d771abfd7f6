"""What a chat template leaves out of a message that is to be trained."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from hpcrl.data.chat.messages import THOUGHTS, Message

_TAG = re.compile(
    r"</?[^<>\s]{1,40}>|\[/?[A-Z_]{1,40}\]"
)  # marks of thoughts and calls, which a template may write in its own way
_SHOWN = 60


def lost_of(message: Message, said: str) -> list[str]:
    """Return what the template does not write of an assistant's message, such as thoughts or tool calls; white space may change.

    Args:
        said: what it writes for the message.
    """
    written, found = _squeezed(said), list[str]()
    for name in ("content", *THOUGHTS):
        if missing := _missing(_text(message.get(name)), written):
            found.append(f"{name} {missing[:_SHOWN]!r}")
    for call in message.get("tool_calls", []):
        function = call["function"]
        parts = [function["name"], *_leaves(function["arguments"])]
        if any(_squeezed(part) not in written and _squeezed(_escaped(part)) not in written for part in parts):
            found.append(f"the tool call {function['name']}")
    return found


def _missing(text: str, written: str) -> str:
    """Return the first part of a text between tags that is not written, in its place; empty where all are."""
    if _squeezed(text) in written:
        return ""
    at = 0
    for part in _TAG.split(text):
        found = written.find(_squeezed(part), at)
        if found < 0:
            return part.strip()
        at = found + len(_squeezed(part))
    return ""


def _text(value: Any) -> str:
    if isinstance(value, list):  # parts, some of which are images
        return "".join(part.get("text", "") for part in value)
    return value if isinstance(value, str) else ""


def _leaves(value: Any) -> Iterator[str]:
    """Yield the texts and numbers of arguments, which templates write as JSON or in forms of their own."""
    if isinstance(value, dict):
        for one in value.values():
            yield from _leaves(one)
    elif isinstance(value, list):
        for one in value:
            yield from _leaves(one)
    elif isinstance(value, str | int | float) and not isinstance(value, bool):
        yield str(value)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")


def _squeezed(text: str) -> str:
    return "".join(text.split())
