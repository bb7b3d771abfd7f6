"""Splits a rendered chat template into the text before, within and behind the messages of the assistant."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hpcrl.data.chat.calls import CallForm, Messages, Tools, call_form
from hpcrl.data.chat.encode import special_tokens
from hpcrl.data.render import RefusedError, render
from hpcrl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ASSISTANT = "assistant"

_ANSWER, _QUESTION, _TOOL = "ANSWER-OF-THE-ASSISTANT", "QUESTION-OF-THE-USER", "tool"
_NAMED = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


class ChatTemplate:
    """The chat template of a tokenizer.

    Args:
        options: further arguments of it, `generator.chat_template_kwargs`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> None:
        self.tokenizer, self._options = tokenizer, dict(options)

    def text(self, messages: Messages, tools: Tools = (), *, prompt: bool = False) -> str:
        """Render a conversation.

        What it adds only where a conversation ends, such as a header of the next answer without being asked for one, is left out.

        Args:
            prompt: whether an answer is asked for.

        Raises:
            DataError: the template refuses the messages.
            ConfigError: there is no template.
        """
        text = self._written(messages, tools, prompt=prompt)
        return text if prompt else text.removesuffix(self.closing)

    def whole(self, messages: Messages) -> str:
        """Return all that the template writes for a conversation; errors as of `text`."""
        return self._written(messages, (), prompt=False)

    @cached_property
    def ending(self) -> str:
        """Rendered text behind an answer, to the first special token, at which an engine stops; all of it without one."""
        return self._to_the_end(self._behind().removesuffix(self.closing))

    @property
    def ends_with_token(self) -> bool:
        """Return whether `ending` is a special token."""
        return self._last_end(self.ending) is not None

    @cached_property
    def ends(self) -> tuple[str, ...]:
        """Rendered text behind an answer, to its end-of-turn token, and behind a tool call; without those that lack one."""
        found = [self.ending] if self.ends_with_token else []
        if self.calls:
            with suppress(DataError):  # it does not show where a call begins
                rendered = self.turn([_question()], _calling([_TOOL], _QUESTION))[1]
                found += [rendered.rpartition(_QUESTION)[2]] if self.is_ended(rendered) else []
        return tuple(found)

    @cached_property
    def calls(self) -> CallForm | None:
        """The form in which the template takes tool calls; None: it writes them in no form."""
        return call_form(lambda messages, tools: self._rendered(messages, tools, prompt=False))

    def check_calls(self, messages: Messages) -> None:
        """Refuse messages with tool calls that the template does not write.

        Raises:
            DataError: there are such messages.
        """
        lost = self.lost_calls(messages)
        if lost:
            raise DataError(
                f"the chat template leaves out {'; '.join(lost)}; use one that writes tool calls (generator.chat_template)"
            )

    def lost_calls(self, messages: Messages) -> list[str]:
        """Return the tool calls of messages where the template writes none."""
        calling = [(at, message["tool_calls"]) for at, message in enumerate(messages) if message.get("tool_calls")]
        if not calling or self.calls is not None:
            return []
        return [f"message {at}: the tool call {call['function']['name']}" for at, calls in calling for call in calls]

    @cached_property
    def structure(self) -> frozenset[str]:
        """Special tokens that stand around messages and texts: those of the tokenizer's own roles, and those that the template writes around a
        question and an answer. All others, such as marks of thoughts and of tool calls, are what an assistant itself may write."""
        special = special_tokens(self.tokenizer)
        found = {str(token) for name in _NAMED if (token := getattr(self.tokenizer, name, None))}
        with suppress(ConfigError, DataError):  # there is no template, or it is one for other conversations
            question, whole = self.text([_question()]), self.text([_question(), _answer(), _question()])
            found |= {
                *special.findall(question),
                *special.findall(whole.rpartition(_ANSWER)[2]),
                *special.findall(self._behind()),
            }
            # before an answer a template may write the marks of an empty thought, which are a pair
            found |= {
                one
                for one in special.findall(whole)
                if not special.fullmatch(one[:1] + "/" + one[1:]) and one[1:2] != "/"
            }
        with suppress(ConfigError, DataError):  # nor do all templates take a message of the system
            found |= {*special.findall(self.text([{"role": "system", "content": "x"}, _question()]))}
        with suppress(ConfigError, DataError):
            # marks that the assistant itself writes before its answer, such as those of channels
            rendered = self.turn([_question()], {"role": ASSISTANT, "content": _QUESTION})[1]
            found -= {*special.findall(rendered.partition(_QUESTION)[0])}
        return frozenset(found)

    def after(self, messages: Messages, tools: Tools = (), *, prompt: bool) -> str:
        """Return the rendered text behind the end of an answer that messages follow; arguments and errors as of `text`.

        Raises:
            ConfigError: the template leaves out the answer, or ends answers now in this way, now in another.
        """
        asked = [_question(), _answer(), *messages]
        try:
            text = self.text(asked, tools, prompt=prompt)
        except DataError:
            if messages[0]["role"] != "tool" or self.calls is None:
                raise
            asked[1] = _calling([messages[0].get("name", _TOOL)])  # some take what a tool says only behind a call of it
            text = self.text(asked, tools, prompt=prompt)
        _, answer, after = text.partition(_ANSWER)
        if not answer:
            raise ConfigError("generator.chat_template: the template leaves out what the assistant says; use another")
        behind = after[self._last_end(after) :] if asked[1].get("tool_calls") else self._behind_end(after)
        if behind is None:
            raise ConfigError(
                f"generator.chat_template: the template ends a message of the assistant with {self.ending!r}, but before "
                f"{[message['role'] for message in messages]} with {after[: len(self.ending)]!r}; use another template"
            )
        return behind

    def others(self, before: Messages, messages: Messages, tools: Tools = ()) -> str:
        """Return the rendered text of messages that are not the assistant's."""
        placed = self._in_place(before)
        return self._added(placed, [*placed, *messages], messages[0], tools)

    def turn(self, before: Messages, message: dict[str, Any], tools: Tools = ()) -> tuple[str, str, str]:
        """Return the rendered text before an assistant's message, the message with its end, and the text behind it.

        Raises:
            DataError: the template does not show where the message begins.
        """
        placed = self._in_place(before)
        text, base = self._added(placed, [*placed, message], message, tools), self._tail(placed, tools)
        asked = self._tail(placed, tools, prompt=True)
        whole, _, after = self.text([*placed, _answer()], tools).rpartition(_ANSWER)
        openings = [one.removeprefix(base) for one in (asked, whole.rpartition(_ANSWER)[2]) if one.startswith(base)]
        # a template may write nothing where an answer is asked for
        begin = next((one for one in (*filter(None, openings[:1]), *openings[1:]) if text.startswith(one)), None)
        if asked == base and begin is not None and begin.isspace():  # then the policy has to write that itself
            begin = ""
        if begin is None:
            raise DataError(
                f"the chat template begins a message of the assistant with {text[:60]!r}, but a prompt for one with {openings}. So its trained "
                "part is unknown; use another template (generator.chat_template), or rows of tokens"
            )
        rendered = text[len(begin) :]
        end = len(rendered) - len(after) + len(self._to_the_end(after)) if rendered.endswith(after) else len(rendered)
        return begin, rendered[:end], rendered[end:]

    def is_ended(self, rendered: str) -> bool:
        """Return whether an assistant's text ends with a token that can end it, as far as the template has one."""
        found = special_tokens(self.tokenizer).finditer(rendered)
        return (
            not self.ends_with_token
            or rendered.endswith(self.ending)
            or any(one.end() == len(rendered) for one in found)
        )

    def _written(self, messages: Messages, tools: Tools, *, prompt: bool) -> str:
        if any(message.get("tool_calls") or message["role"] == "tool" for message in messages) and self.calls:
            messages = self.calls.written(messages)
        return self._rendered(messages, tools, prompt=prompt)

    def _rendered(self, messages: Messages, tools: Tools, *, prompt: bool) -> str:
        if not self.tokenizer.chat_template and "chat_template" not in self._options:
            raise ConfigError(
                "generator.chat_template: the tokenizer has no chat template; expected the template that the model was trained with. "
                'Name a Jinja file (generator.chat_template.source = "file", generator.chat_template.name_or_path), or set '
                'data.format = "text" for texts without turns'
            )
        tokenizer, options = self.tokenizer, dict(self._options)
        if tools:
            options["tools"] = list(tools)
        try:
            # as `apply_chat_template` does
            template = tokenizer.get_chat_template(options.pop("chat_template", None), options.get("tools"))
            options = {**tokenizer.special_tokens_map, **options, "add_generation_prompt": prompt}
            return render(template, {**options, "conversations": [messages]})
        except RefusedError as error:
            raise DataError(f"the chat template refuses its messages: {error}") from error
        except DataError as error:
            raise DataError(f"the chat template of {tokenizer.name_or_path}: {error}") from error
        except (TypeError, ValueError, AttributeError, RecursionError) as error:  # it is sent to another process
            raise DataError(f"the chat template refuses its messages: {type(error).__name__}: {error}") from error

    @cached_property
    def closing(self) -> str:
        """The template's text at the end of a conversation only. Llama 3's first template always adds a header of the next answer there, Phi-3's
        a token behind the last turn."""
        try:
            question, asked = (self._written([_question()], (), prompt=prompt) for prompt in (False, True))
            answered, alone = self._written([_question(), _answer()], (), prompt=False), self._behind()
            if question == asked and answered.startswith(question + _ANSWER):
                return _common_suffix(alone[len(self._to_the_end(alone)) :], question)
            followed = self._behind([_question()])
        except DataError:  # it is one for other conversations
            return ""
        same = alike(alone, followed)
        within = (
            one.start() for one in special_tokens(self.tokenizer).finditer(alone) if one.start() < same < one.end()
        )
        same = next(within, same)
        end = self._last_end(alone)
        return alone[same:] if end is not None and end <= same else ""

    def _behind(self, messages: Sequence[dict[str, Any]] = ()) -> str:
        return self._written([_question(), _answer(), *messages], (), prompt=False).rpartition(_ANSWER)[2]

    def _to_the_end(self, text: str) -> str:
        return text[: self._last_end(text)]

    def _last_end(self, text: str) -> int | None:
        """Return where the first special token of a text ends, or the first added one; None: there is none."""
        for pattern in (special_tokens(self.tokenizer), self._added_tokens):
            if found := pattern.search(text):
                return found.end()
        return None

    @cached_property
    def _added_tokens(self) -> re.Pattern[str]:
        names = sorted((one.content for one in self.tokenizer.added_tokens_decoder.values()), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names)) or "(?!)")

    def _added(self, before: Messages, messages: Messages, message: dict[str, Any], tools: Tools) -> str:
        base, text = self._tail(before, tools), self._tail(messages, tools)
        if not text.startswith(base):
            # as of gpt-oss, whose last answer ends with another token than those before it
            behind, own = self._behind_end(text), self._behind_end(base)
            answered = any(one["role"] == ASSISTANT for one in before)
            if answered and behind is not None and own is not None and behind.startswith(own):
                return behind[len(own) :]
            raise DataError(
                f"the chat template writes what comes before a message of {message['role']} in another way once that is there; use another "
                "template (generator.chat_template), or rows of tokens"
            )
        return text[len(base) :]

    def _in_place(self, messages: Messages) -> Messages:
        """Return messages with a word in the place of the assistant's texts, so that a template cannot drop parts of earlier turns."""
        found = Messages()
        for message in messages:
            if message["role"] == ASSISTANT:
                calls = message.get("tool_calls", []) if self.calls else []
                message = _calling([call["function"]["name"] for call in calls]) if calls else _answer()
            found.append(message)
        return found

    def _behind_end(self, text: str) -> str | None:
        """Return the text behind the end of an answer, be it the template's `ending` or another token; None: neither is there."""
        if not self.ends_with_token:
            return text
        if text.startswith(self.ending):
            return text[len(self.ending) :]
        special = special_tokens(self.tokenizer)
        places = [one.start() for pattern in (special, self._added_tokens) for one in pattern.finditer(self.ending)]
        before = self.ending[: places[0]]
        other = special.match(text, len(before)) if text.startswith(before) else None
        return text[other.end() :] if other else None

    def _tail(self, messages: Messages, tools: Tools, *, prompt: bool = False) -> str:
        """Return the text behind the last answer that stands in for the assistant's; the whole of it where there is none."""
        return self.text(messages, tools, prompt=prompt).rpartition(_ANSWER)[2] if messages else ""


def _question() -> dict[str, Any]:
    return {"role": "user", "content": _QUESTION}


def _answer() -> dict[str, Any]:
    return {"role": ASSISTANT, "content": _ANSWER}


def _calling(names: Sequence[str], value: str = _ANSWER) -> dict[str, Any]:
    calls = [{"type": "function", "function": {"name": name, "arguments": {"x": value}}} for name in names]
    return {"role": ASSISTANT, "content": "", "tool_calls": calls}


def _common_suffix(one: str, other: str) -> str:
    return one[len(one) - alike(one[::-1], other[::-1]) :]


def alike(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how many entries both begin with."""
    places = enumerate(zip(one, other, strict=False))
    return next((at for at, (own, its) in places if own != its), min(len(one), len(other)))
