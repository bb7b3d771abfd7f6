"""Finds the tokens that end a turn of the policy, for engines and for the text after a turn.

Files of released models disagree about it: the tokenizer names one token, generation_config.json a list, and the chat template writes a third
behind an answer. All of them end a turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from hpcrl.config.sections.model import Pretrained
from hpcrl.data.chat.encode import encoded
from hpcrl.data.chat.template import ChatTemplate
from hpcrl.data.entries import files_of, read_entries
from hpcrl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FILES = ("generation_config.json", "config.json")


def declared_ends(model: Pretrained) -> dict[str, frozenset[int]]:
    """Return the ids that a model's files call the end of a text, by file; files that it lacks are left out."""
    found = dict[str, frozenset[int]]()
    for file in files_of(model.path, _FILES, **model.at_revision):
        entries = read_entries(file)
        found[file.name] = frozenset(_ids_of(entries) | _ids_of(entries.get("text_config") or {}))
    return found


def end_ids(tokenizer: PreTrainedTokenizerBase, model: Pretrained | None, endings: Iterable[str]) -> frozenset[int]:
    """Return the ids that end a turn.

    Args:
        model: whose files name some; None: only the tokenizer does.
        endings: what the chat template writes behind answers, to the token that ends them; `ChatTemplate.ends`.
    """
    found = set[int]().union(*declared_ends(model).values()) if model else set[int]()
    if isinstance(tokenizer.eos_token_id, int):
        found.add(tokenizer.eos_token_id)
    found |= {written for ending in endings if (written := template_end(tokenizer, ending)) is not None}
    return frozenset(one for one in found if one < len(tokenizer))


def text_end(tokenizer: PreTrainedTokenizerBase, model: Pretrained | None) -> int | None:
    """Return the id of the token that ends a plain text: the tokenizer's, unless generation does not stop there and the model names others.

    Of several it is the lowest: ends of turns were added behind the end of a text.

    Args:
        model: whose files name the tokens at which generation stops; None: only the tokenizer names one.
    """
    own = cast("int | None", tokenizer.eos_token_id)
    named = (
        next((ends for ends in declared_ends(model).values() if ends), frozenset[int]()) if model else frozenset[int]()
    )
    known = {one for one in named if one < len(tokenizer)}
    return own if own in known or not known else min(known)


def trained_end(
    tokenizer: PreTrainedTokenizerBase, model: Pretrained, options: Mapping[str, Any], *, texts: bool = False
) -> int | None:
    """Return the id of the token that ends a trained answer: what the chat template writes behind it, else `text_end`.

    Args:
        options: arguments of the template, `generator.chat_template_kwargs`.
        texts: rows are plain texts, which no template ends.
    """
    written = None
    if tokenizer.chat_template and not texts:
        with suppress(DataError):  # it is one for other conversations
            written = template_end(tokenizer, ChatTemplate(tokenizer, options).ending)
    return text_end(tokenizer, model) if written is None else written


def template_end(tokenizer: PreTrainedTokenizerBase, ending: str) -> int | None:
    """Return the id of the token that an ending of the chat template ends with; None: it ends with plain text, at which no engine stops."""
    last = encoded(tokenizer, ending)[-1:]
    return last[0] if last and last[0] in tokenizer.added_tokens_decoder else None


def _ids_of(entries: dict[str, Any]) -> set[int]:
    named = entries.get("eos_token_id")
    return {one for one in (named if isinstance(named, list) else [named]) if isinstance(one, int)}
