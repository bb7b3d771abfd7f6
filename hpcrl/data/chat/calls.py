"""Finds the form in which a chat template takes tool calls, by trials: templates of released models differ.

DeepSeek's wants the arguments as JSON text and null for the content, Qwen's an object and an empty text, Mistral's ids of nine letters and digits.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from hpcrl.data.chat.messages import Message
from hpcrl.errors import DataError

Messages = list[Message]
Tools = Sequence[dict[str, Any]]
Empty = Literal["text", "null", "absent"]
Ids = Literal["given", "filled", "nine"]

_NAME, _KEY, _TEXT, _NUMBER, _RESULT = "probed_call", "probed_key", "value of the probe", 31557, "result of the probe"
_LONG_ID = "call_of_the_probe_0"
_NINE = re.compile(r"[a-zA-Z0-9]{9}")
_PROPERTIES = {"one": {"type": "string", "description": "x"}, _KEY: {"type": "integer", "description": "x"}}
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "x",
        "parameters": {"type": "object", "properties": _PROPERTIES, "required": ["one"]},
    },
}
_QUESTION = {"role": "user", "content": "question of the probe"}


@dataclass(frozen=True)
class CallForm:
    """Writes messages of `read_messages`, which have one form, as a chat template takes them.

    Attributes:
        as_text: whether arguments are JSON text, and else objects.
        empty: what the content is where a message has tool calls and no content.
        ids: those of the rows, or made up where rows have none, or made up where they are not nine letters and digits.
    """

    as_text: bool = False
    empty: Empty = "text"
    ids: Ids = "given"

    def written(self, messages: Messages) -> Messages:
        """Return messages with their tool calls, and the answers of tools, in this form."""
        found, waiting, count = Messages(), list[str](), 0
        for message in messages:
            if calls := message.get("tool_calls"):
                ids = [self._id(call.get("id"), number) for number, call in enumerate(calls, count)]
                waiting, count = [one for one in ids if one], count + len(calls)
                message = self._calling(message, ids)
            elif message["role"] == "tool":
                own = self._id(message.get("tool_call_id"), count) if message.get("tool_call_id") else None
                answered = own or (waiting[0] if waiting and self.ids != "given" else None)
                if answered is None and self.ids != "given":  # what stands before it are tokens of the policy
                    answered = self._id(None, count)
                waiting = [one for one in waiting if one != answered]
                message = {**message, **({"tool_call_id": answered} if answered else {})}
            found.append(message)
        return found

    def _calling(self, message: Message, ids: Sequence[str | None]) -> Message:
        calls = list[dict[str, Any]]()
        for call, own in zip(message["tool_calls"], ids, strict=True):
            function = call["function"]
            if self.as_text:
                function = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
            calls.append({**({"id": own} if own else {}), "type": "function", "function": function})
        message = {**message, "tool_calls": calls}
        if message.get("content") == "" and self.empty != "text":
            message["content"] = None
            if self.empty == "absent":
                del message["content"]
        return message

    def _id(self, given: str | None, number: int) -> str | None:
        if self.ids == "given" or (given and (self.ids == "filled" or _NINE.fullmatch(given))):
            return given
        return hashlib.sha256((given or str(number)).encode()).hexdigest()[:9]


def call_form(write: Callable[[Messages, Tools], str]) -> CallForm | None:
    """Return the first form in which a chat template writes tool calls with all that they have; None: it writes them in no form.

    Where some of these forms are written with the answer of a tool too, it is the first of them.

    Args:
        write: writes messages and tools with the template.
    """
    forms = [CallForm(*one) for one in product((False, True), ("text", "null", "absent"), ("given", "filled", "nine"))]
    calling = [form for form in forms if _is_written(write, form, answered=False)]
    return next((form for form in calling if _is_written(write, form, answered=True)), next(iter(calling), None))


def _is_written(write: Callable[[Messages, Tools], str], form: CallForm, *, answered: bool) -> bool:
    """Return whether name, keys and values of a call stand in what is written, be it with an id in the row or without one."""
    for own in ({}, {"id": _LONG_ID}):
        function = {"name": _NAME, "arguments": {"one": _TEXT, _KEY: _NUMBER}}
        messages = [_QUESTION, {"role": "assistant", "content": "", "tool_calls": [{**own, "function": function}]}]
        if answered:
            messages.append({"role": "tool", "content": _RESULT, **({"tool_call_id": _LONG_ID} if own else {})})
        try:
            before, whole = write([_QUESTION], [_TOOL]), write(form.written(messages), [_TOOL])
        except DataError:
            return False
        name, key, *values = (
            whole.count(part) - before.count(part) for part in (_NAME, _KEY, _TEXT, str(_NUMBER), _RESULT)
        )
        # arguments that Python has written, JSON as a text within JSON, or a content that is none
        spoiled = (whole.count(part) > before.count(part) for part in (f"'{_NAME}'", f"'{_KEY}'", f'\\"{_KEY}', "None"))
        if not name or not key or values != [1, 1, int(answered)] or any(spoiled):
            return False
    return True
