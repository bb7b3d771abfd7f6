"""Finds trained text of a message that a chat template leaves out."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from hpcrl.data.chat.messages import THOUGHTS, Message
from hpcrl.data.chat.template import ChatTemplate

_TAG = re.compile(r"(</?[^<>\s]{1,40}>|\[/?[A-Z_]{1,40}\])")  # marks of thoughts and calls
_EMPTY = re.compile(r"<([^<>/\s]{1,40})>\s*</\1>|\[([A-Z_]{1,40})\]\s*\[/\2\]")
_SHOWN = 60


def lost_of(template: ChatTemplate, message: Message, before: str, rendered: str) -> list[str]:
    """Return the parts of an assistant's message that the template omits, such as thoughts or tool calls; white space may change.

    Args:
        before, rendered: what it writes before the message, and for it, as of `ChatTemplate.turn`.
    """
    found = list[str]()
    texts = {name: _text(message.get(name)) for name in ("content", *THOUGHTS)}
    for name, text in texts.items():
        if missing := _missing(text, before, rendered, template.ending):
            found.append(f"{name} {missing[:_SHOWN]!r}")
    found += [f"the tool call {name}" for name in _lost_calls(message.get("tool_calls", []), texts, rendered)]
    if not template.is_ended(rendered):
        found.append("the token that ends it")
    return found


def _lost_calls(calls: Sequence[dict[str, Any]], texts: dict[str, str], rendered: str) -> list[str]:
    functions, written = [call["function"] for call in calls], _squeezed(rendered)
    found = list[str]()
    for name, count in Counter(function["name"] for function in functions).items():
        alone = re.compile(rf"(?<!\w){re.escape(name)}(?!\w)")
        if len(alone.findall(rendered)) - sum(len(alone.findall(text)) for text in texts.values()) < count:
            found.append(name)
    for function in functions:
        parts = list(_leaves(function["arguments"]))
        if any(_squeezed(part) not in written and _squeezed(_escaped(part)) not in written for part in parts):
            found.append(function["name"])
    return list(dict.fromkeys(found))


def _missing(text: str, before: str, rendered: str, ending: str) -> str:
    """Return the first part of a text that is not written, in its place; empty where all are.

    A tag is written as it is, in `before` too, or something else stands in its place.
    """
    written, tags, at = _squeezed(rendered).removesuffix(_squeezed(ending)), list[str](), 0
    if _squeezed(text) in written:
        return ""
    parts = _TAG.split(_EMPTY.sub("", text))  # no thought is no loss
    for number, part in enumerate(parts):
        own = _squeezed(part)
        if number % 2:
            tags.append(own)
        elif own or number == len(parts) - 1:
            begin = written.find(own, at) if own else len(written)
            if begin < 0:
                return part.strip()
            gap, lost = written[at:begin], list[str]()
            for tag in tags:
                if tag in gap:
                    gap = gap.replace(tag, "", 1)
                elif at or tag not in before:
                    lost.append(tag)
            if lost and not gap:
                return lost[0]
            at, tags = begin + len(own), list[str]()
    return ""


def _text(value: Any) -> str:
    if isinstance(value, list):  # parts, some of which are images
        return "".join(part.get("text", "") for part in value)
    return value if isinstance(value, str) else ""


def _leaves(value: Any) -> Iterator[str]:
    """Yield the keys, texts and numbers of arguments, which templates write as JSON or in forms of their own."""
    if isinstance(value, dict):
        for name, one in value.items():
            yield name
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
