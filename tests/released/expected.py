"""What a conversation is to become, from tokenizer.json by `tokenizers` and from the chat template by transformers, without hpcrl."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from tests.released.material import Case, Messages

_ANSWER = "WHAT-THE-ASSISTANT-ANSWERS"


class Refused(Exception):
    """The template refuses messages."""


@dataclass(frozen=True)
class Turn:
    """An answer of the assistant as text.

    Attributes:
        before: what stands between the answer before, or the beginning, and this one: the end of that one left out.
        answer: with the token that ends it.
        end: that token.
    """

    before: str
    answer: str
    end: str


@dataclass(frozen=True)
class Reference:
    """A tokenizer and its chat template.

    Attributes:
        own_template: where the tokenizer has none.
    """

    folder: Path
    case: Case
    own_template: Path | None = None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    def id_of(self, token: str) -> int:
        found = self.tokenizer.token_to_id(token)
        assert found is not None
        return found

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def text(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False)

    @cached_property
    def _settings(self) -> dict[str, str]:
        config = json.loads((self.folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        tokens = {name: config[name] for name in ("bos_token", "eos_token", "pad_token") if config.get(name)}
        return {name: one["content"] if isinstance(one, dict) else one for name, one in tokens.items()}

    @cached_property
    def _template(self) -> str:
        beside = self.own_template or self.folder / "chat_template.jinja"
        if beside.exists():
            return beside.read_text(encoding="utf-8")
        return json.loads((self.folder / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"]

    def written(self, messages: Messages, tools: Messages, *, prompt: bool = False) -> str:
        """Return what the template writes.

        Raises:
            Refused: it refuses the messages.
        """
        try:
            (text,), _ = render_jinja_template(
                [[self._wanted(message) for message in messages]],
                tools=tools or None,
                chat_template=self._template,
                add_generation_prompt=prompt,
                **self._settings,
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise Refused(str(error)) from error
        return text

    def turns(self, messages: Messages, tools: Messages) -> list[Turn]:
        """Return the answers of a conversation, each as the template writes it where it is the last message, with what stands before it."""
        found = list[Turn]()
        for at, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self.written(messages[:at], tools, prompt=True)
            whole = self.written(messages[: at + 1], tools)
            if not whole.startswith(prompt):
                raise Refused(f"the template does not continue {prompt[-60:]!r}: {whole[-120:]!r}")
            end = self._end(message)
            answer, written, _ = whole[len(prompt) :].partition(end)
            if not written:
                raise Refused(f"no {end} behind {answer!r}")
            found.append(Turn(self._before(messages[:at], tools), answer + end, end))
        return found

    def _end(self, message: dict[str, Any]) -> str:
        return self.case.call_end or self.case.end if message.get("tool_calls") else self.case.end

    def _wanted(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message in the form that the template wants."""
        if not message.get("tool_calls") or not self.case.calls_as_text:
            return message
        functions = [call["function"] for call in message["tool_calls"]]
        texts = [{**one, "arguments": json.dumps(one["arguments"])} for one in functions]
        calls = [{**call, "function": one} for call, one in zip(message["tool_calls"], texts, strict=True)]
        return {**message, "content": message["content"] or None, "tool_calls": calls}

    def _before(self, messages: Messages, tools: Messages) -> str:
        """Return what the template writes behind the end of the last answer among `messages`, an answer being asked for.

        That answer stands as a word, since templates may write answers of the past otherwise.
        """
        last = next((at for at in reversed(range(len(messages))) if messages[at]["role"] == "assistant"), None)
        if last is not None and messages[last].get("tool_calls"):  # which stay as they are in the past
            value = list(messages[last]["tool_calls"][-1]["function"]["arguments"].values())[-1]
            _, end, behind = (
                self.written(messages, tools, prompt=True)
                .rpartition(str(value))[2]
                .partition(self._end(messages[last]))
            )
            assert end
            return behind
        placed = [
            {"role": "assistant", "content": _ANSWER}
            if message["role"] == "assistant" and not message.get("tool_calls")
            else message
            for message in messages
        ]
        text = self.written(placed, tools, prompt=True)
        if _ANSWER not in text:
            return text
        _, end, behind = text.rpartition(_ANSWER)[2].partition(self.case.past_end or self.case.end)
        assert end
        return behind

    def trained(self, texts: Sequence[tuple[str, bool]]) -> tuple[list[int], list[bool]]:
        """Return the ids of a text and which of them have a character of its trained parts."""
        whole = self.tokenizer.encode("".join(text for text, _ in texts), add_special_tokens=False)
        borders = list(pairwise(accumulate([0, *(len(text) for text, _ in texts)])))
        spans = [border for border, (_, trained) in zip(borders, texts, strict=True) if trained]
        mask = [any(begin < last and first < end for first, last in spans) for begin, end in whole.offsets]
        return whole.ids, mask
