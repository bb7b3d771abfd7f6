"""Checks a model's tokenizer, end-of-turn tokens and chat template on conversations, before submission."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hpcrl.config.sections.generator import ChatTemplateConfig
from hpcrl.config.sections.model import Pretrained
from hpcrl.data.chat.encode import special_tokens
from hpcrl.data.chat.ending import declared_ends, end_ids, template_end, text_end
from hpcrl.data.chat.lost import lost_of
from hpcrl.data.chat.messages import read_messages
from hpcrl.data.chat.template import ASSISTANT, ChatTemplate, Messages
from hpcrl.data.tokenizer import PROBE, load_tokenizer, without_torch
from hpcrl.errors import DataError
from hpcrl.launch.doctor.finding import Finding, error, ok, warning

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATE = "generator.chat_template"
"""The setting that remedies what is found of a chat template."""

TEXT_END = "end of a text"

_QUESTION, _ANSWER = {"role": "user", "content": "What is 1 + 2?"}, {"role": "assistant", "content": "It is 3."}
_THOUGHT = {"role": "assistant", "content": "<think>\nlet me add\n</think>\n\nIt is 3."}
_CALL = {"type": "function", "function": {"name": "add", "arguments": {"first": "one", "second": "two"}}}
_CALLING = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_SYSTEM = {"role": "system", "content": "Answer in one sentence."}
_MOST_SHOWN = 6


def of_tokenizer(
    model: Pretrained, template: ChatTemplateConfig, options: Mapping[str, Any], *, chats: bool = True
) -> Iterator[Finding]:
    """Yield what is found of a model's tokenizer and chat template.

    Args:
        options: of the template, `generator.chat_template_kwargs`.
        chats: whether conversations are written with the template; False: only texts are read.

    Raises:
        DataError, ConfigError: as of `load_tokenizer`, such as a tokenizer that transformers loads with other ids than tokenizer.json gives.
    """
    with without_torch():
        tokenizer = load_tokenizer(model, template)
    yield _of_ids(tokenizer)
    if not chats:
        yield _of_text_end(tokenizer, model)
        return
    if not tokenizer.chat_template and "chat_template" not in options:
        remedy = f'set {TEMPLATE} (source = "file", name_or_path) to one that writes conversations as the model is to read them'
        yield error("chat template", "the tokenizer has none", remedy)
        return
    written = ChatTemplate(tokenizer, options)
    try:
        written.text([_QUESTION, _ANSWER])
    except DataError as refused:
        yield warning("chat template", f"it takes no question with an answer: {refused}", f"use another ({TEMPLATE})")
        return
    yield _of_ends(tokenizer, written, model)
    yield from _of_template(written)
    yield _of_special(written)


def _of_ids(tokenizer: PreTrainedTokenizerBase) -> Finding:
    kind = type(tokenizer).__name__
    lost = [text for text in PROBE if _knows(tokenizer, text) and _there_and_back(tokenizer, text) != text]
    if lost:
        found = f"{_there_and_back(tokenizer, lost[0])!r} comes back for {lost[0]!r}"
        remedy = "a policy reads and writes texts in this form; compare tokenizer.json with the one that was published"
        return warning("tokenizer", f"{kind}: {found}", remedy)
    return ok("tokenizer", f"{kind}, {len(tokenizer):,} tokens: the ids of tokenizer.json, and texts come back")


def _knows(tokenizer: PreTrainedTokenizerBase, text: str) -> bool:
    """Return whether a tokenizer has tokens for all characters of a text but white space; those of tests know a few letters only."""
    each = [tokenizer.encode(one, add_special_tokens=False) for one in set("".join(text.split()))]
    return all(ids and tokenizer.unk_token_id not in ids for ids in each)


def _there_and_back(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    return str(tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)))


def _of_ends(tokenizer: PreTrainedTokenizerBase, written: ChatTemplate, model: Pretrained) -> Finding:
    """Compare what names the end of a turn, and say what is used: all of it."""
    ids = end_ids(tokenizer, model, written.ends)
    end = template_end(tokenizer, written.ending)
    named = {name: sorted(ends) for name, ends in declared_ends(model).items() if ends}
    if isinstance(tokenizer.eos_token_id, int):
        named["tokenizer"] = [tokenizer.eos_token_id]
    sources = [f"{name}: {_names(tokenizer, own)}" for name, own in named.items()]
    if end is None:
        found = (
            f"the chat template writes {written.ending!r} behind an answer, no token that ends it; {'; '.join(sources)}"
        )
        remedy = (
            f"an answer that is trained has no end, and engines stop at its length; use another template ({TEMPLATE})"
        )
        return warning("end of a turn", found, remedy)
    found = f"{_names(tokenizer, sorted(ids))} ({'; '.join([f'chat template: {_names(tokenizer, [end])}', *sources])})"
    if all(own == [end] for own in named.values()):
        return ok("end of a turn", found)
    note = f"all of them end a turn; {_names(tokenizer, [end])} is trained, as the chat template writes it"
    agree = all(end in own for own in named.values())
    return ok("end of a turn", found, note) if agree else warning("end of a turn", found, note)


def _of_text_end(tokenizer: PreTrainedTokenizerBase, model: Pretrained) -> Finding:
    """Compare what names the end of a plain text, and say what is trained as that."""
    end, named = text_end(tokenizer, model), declared_ends(model)
    if end is None:
        found = "neither the tokenizer nor the model's files name a token that ends a text"
        return warning(
            TEXT_END, found, "texts are trained without an end; name one in tokenizer_config.json (eos_token)"
        )
    sources = [f"{name}: {_names(tokenizer, sorted(ends))}" for name, ends in named.items() if ends]
    sources.append(f"tokenizer: {tokenizer.eos_token or 'none'}")
    found = f"{_names(tokenizer, [end])} is trained behind each text ({'; '.join(sources)})"
    if end == tokenizer.eos_token_id:
        return ok(TEXT_END, found)
    return warning(
        TEXT_END,
        found,
        "the tokenizer names one at which generation does not stop; mend its eos_token where that is right",
    )


def _names(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return ", ".join(map(str, tokenizer.convert_ids_to_tokens(ids)))


def _of_template(written: ChatTemplate) -> Iterator[Finding]:
    lost = {
        "turns": _lost(written, [_QUESTION, _ANSWER, _QUESTION, _ANSWER]),
        "thoughts": _lost(written, [_QUESTION, _THOUGHT]),
        "tool calls": _lost(written, read_messages([_QUESTION, _CALLING])),
        "system message": _lost_system(written),
    }
    kept = [what for what, missing in lost.items() if not missing]
    if kept:
        yield ok("chat template", f"it writes {', '.join(kept)}")
    for what, missing in lost.items():
        if missing:
            yield warning("chat template", f"{what}: {missing}", f"rows with {what} need another template ({TEMPLATE})")


def _lost(written: ChatTemplate, messages: Messages) -> str:
    """Return trained text of a conversation that the template omits; empty without such text."""
    missing, end = list[str](), 0
    try:
        for at, message in enumerate(messages):
            if message["role"] == ASSISTANT:
                written.others(messages[:end], messages[end:at])
                begin, rendered, _ = written.turn(messages[:at], message)
                missing += lost_of(written, message, begin, rendered)
                end = at + 1
    except DataError as refused:
        return str(refused)
    return f"it leaves out {'; '.join(missing)}" if missing else ""


def _lost_system(written: ChatTemplate) -> str:
    try:
        text = written.text([_SYSTEM, _QUESTION], prompt=True)
    except DataError as refused:
        return str(refused)
    return "" if _SYSTEM["content"] in text else "it leaves them out"


def _of_special(written: ChatTemplate) -> Finding:
    names = {str(token) for token in written.tokenizer.added_tokens_decoder.values()}
    special = {name for name in names if special_tokens(written.tokenizer).fullmatch(name)}
    own, around = sorted(special - written.structure), sorted(special & written.structure)
    shown = ", ".join(own[:_MOST_SHOWN]) + (f" and {len(own) - _MOST_SHOWN} more" if len(own) > _MOST_SHOWN else "")
    return ok("special tokens", f"rewards see {shown or 'none'} in an answer, and leave out {', '.join(around)}")
