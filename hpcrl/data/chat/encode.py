"""Tokenizes rendered chat templates: all of a text at once, with special tokens that are text, and with trained parts."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar, cast

from hpcrl.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerBase

Piece = tuple[str, bool]
"""A text, and whether it is trained."""

_CUT = "\U0010fffd"  # the last private character, which means nothing; twice it is itself
_MARK = re.compile(f"({_CUT}{{1,2}})")
_Spans = Sequence[tuple[int, int]]
_Value = TypeVar("_Value")


def cut_messages(tokenizer: PreTrainedTokenizerBase, messages: _Value, kept: Collection[str] = ()) -> _Value:
    """Return messages, or a text, with a mark inside of each special token that is written in it: `encoded` then makes text of it.

    Args:
        kept: special tokens that stay tokens.

    Raises:
        DataError: one of them cannot be divided.
    """
    pattern = special_tokens(tokenizer)

    def halves(found: re.Match[str]) -> str:
        head, tail = found[0][:1], found[0][1:]
        if found[0] in kept:
            return found[0]
        if not tail or pattern.search(tail):
            raise DataError(
                f"{found[0]!r} is a special token that cannot be given as text; leave it out of the messages, or set "
                "generator.chat_template.allow_special_tokens"
            )
        return head + _CUT + tail

    return _each_text(messages, lambda text: pattern.sub(halves, text.replace(_CUT, _CUT * 2)))


def uncut_messages(messages: _Value) -> _Value:
    """Return messages, or a text, for `encoded`, with special tokens that are written in them as those tokens."""
    return _each_text(messages, lambda text: text.replace(_CUT, _CUT * 2))


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {name: _each_text(part, change) for name, part in value.items()}
    return [_each_text(part, change) for part in value] if isinstance(value, list) else value


def encoded(tokenizer: PreTrainedTokenizerBase, text: str, behind: str = "") -> list[int]:
    """Return the token ids of a text in which `cut_messages` may have left its marks, which are no part of it.

    Args:
        behind: text that stands before it, whose tokens are left out. Tokenizers in the manner of sentencepiece write a space before a
            text that follows nothing.
    """
    if not tokenizer.is_fast:
        return [one for part in _parts(text) for one in tokenizer.encode(part, add_special_tokens=False)]
    if not behind:
        return _encoded(tokenizer, text)[0]
    length = len("".join(_parts(behind)))
    token_ids, spans = _encoded(tokenizer, behind + text)
    first = bisect_left(spans, length, key=lambda span: span[0])
    if first and spans[first - 1][1] > length:  # a token has characters of both
        return _encoded(tokenizer, text)[0]
    return token_ids[first:]


def encoded_pieces(tokenizer: PreTrainedTokenizerBase, pieces: Sequence[Piece]) -> tuple[list[int], list[bool]]:
    """Return the token ids of the text that pieces make together, T of them, and which of them are trained.

    A token is trained if it has a trained character: where the tokenizer joins characters on both sides of a border, the assistant's
    text is in that token alone.
    """
    if not tokenizer.is_fast:
        return _encoded_apart(tokenizer, pieces)
    text = "".join(text for text, _ in pieces)
    token_ids, spans = _encoded(tokenizer, text)
    mask, begin = [False] * len(token_ids), 0
    for piece, trained in pieces:
        end = begin + len(piece) - len(_MARK.findall(piece))
        if trained and end > begin:
            first = bisect_right(spans, begin, key=lambda span: span[1])
            last = bisect_left(spans, end, key=lambda span: span[0])
            mask[first:last] = [True] * (last - first)
        begin = end
    return token_ids, mask


def _encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], _Spans]:
    """Return token ids, and the characters that each stands for, as begin and end in the text without marks."""
    first, *others = _parts(text)
    (found,) = _backend(tokenizer).encode_batch(
        [first], add_special_tokens=False
    )  # `encode` keeps the interpreter's lock
    if not others:
        return found.ids, _SpansOf(found)
    token_ids, spans, length = found.ids, found.offsets, len(first)
    for part in others:
        ids, own = _encoded_behind(tokenizer, part)
        token_ids += ids
        spans += [(begin + length, end + length) for begin, end in own]
        length += len(part)
    return token_ids, spans


def _parts(text: str) -> list[str]:
    if _CUT not in text:
        return [text]
    found = [""]
    for at, part in enumerate(_MARK.split(text)):
        if at % 2 and part == _CUT:
            found.append("")
        else:
            found[-1] += part[: len(part) // 2] if at % 2 else part
    return found


class _SpansOf(Sequence[tuple[int, int]]):
    """The spans of tokens, each made when it is asked for: a border needs a few of them, and a list of all takes a tenth of the time."""

    def __init__(self, encoding: Encoding) -> None:
        self._encoding = encoding

    def __len__(self) -> int:
        return len(self._encoding)

    def __getitem__(self, at: int) -> tuple[int, int]:  # pyright: ignore[reportIncompatibleMethodOverride]  no slices
        return cast("tuple[int, int]", self._encoding.token_to_chars(at))


def _backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    return cast("Tokenizer", tokenizer.backend_tokenizer)  # a property, which transformers does not annotate


def _encoded_behind(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the token ids and spans of a text without marks that follows other text, so that no space is written before it."""
    if _begins_with_space(tokenizer):
        (found,) = _backend(tokenizer).encode_batch([f"\n{text}"], add_special_tokens=False)
        at = next((at for at, (begin, _) in enumerate(found.offsets) if begin), len(found.ids))
        if not at or found.offsets[at - 1][1] == 1:
            return found.ids[at:], [(begin - 1, end - 1) for begin, end in found.offsets[at:]]
    (found,) = _backend(tokenizer).encode_batch([text], add_special_tokens=False)
    return found.ids, found.offsets


def _encoded_apart(tokenizer: PreTrainedTokenizerBase, pieces: Sequence[Piece]) -> tuple[list[int], list[bool]]:
    """Encode as `encoded_pieces`, with a tokenizer without offsets: it must give pieces the ids of the whole text."""
    token_ids, mask = list[int](), list[bool]()
    for text, trained in pieces:
        ids = encoded(tokenizer, text)
        token_ids += ids
        mask += [trained] * len(ids)
    if token_ids != encoded(tokenizer, "".join(text for text, _ in pieces)):
        raise DataError(
            f"{type(tokenizer).__name__} has no offsets, and gives a conversation other ids than its parts; expected a tokenizer.json "
            "beside the model"
        )
    return token_ids, mask


@lru_cache(maxsize=4)
def _begins_with_space(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a tokenizer writes a space before a text that follows nothing, as those of sentencepiece do."""
    alone, behind = (tokenizer.encode(text, add_special_tokens=False) for text in ("a", "\na"))
    return bool(alone) and behind[-len(alone) :] != alone


@lru_cache(maxsize=4)
def special_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Return a pattern of the special tokens in a text."""
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    names = sorted({*tokenizer.all_special_tokens, *added} - {""}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, names)) or "(?!)")
