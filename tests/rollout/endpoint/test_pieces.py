"""What is told of a text while its tokens come: whole characters, nothing of a stop text, and together the text."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from tokenizers import Tokenizer, decoders, models

from hpcrl.rollout.endpoint.session import TextInPieces

TEXTS = ["so </q> it was", "näïve — 🙂🙂 ok", "ab\n\nab <tool_call>{}", "\ufffd and then", "🧑‍🚀", "   ", ""]


def by_bytes(token_ids: Sequence[int]) -> str:
    """Return the text of tokens that are a byte each."""
    return bytes(token_ids).decode(errors="replace")


def by_words() -> tuple[Tokenizer, Callable[[Sequence[int]], str]]:
    """A tokenizer whose texts lose the space before their first word, as SentencePiece writes it."""
    words = ["▁so", "▁it", "▁", "s", ".", "▁was"]
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="s"))
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer, lambda token_ids: tokenizer.decode(list(token_ids))


def told(decode: Callable[[Sequence[int]], str], token_ids: Sequence[int], marks: Sequence[str] = ()) -> list[str]:
    text = TextInPieces(decode, marks)
    pieces = [text.add([token_id]) for token_id in token_ids]
    assert "".join(pieces) == text.sent
    return pieces


@pytest.mark.parametrize("text", TEXTS)
def test_characters_are_told_when_they_are_whole(text: str) -> None:
    pieces = told(by_bytes, text.encode())
    assert "".join(pieces) == text
    if "\ufffd" not in text:  # which may be half a character as well
        assert [piece for piece in pieces if piece] == list(text)


def test_bytes_that_are_no_text_are_told_as_the_whole_has_them() -> None:
    source = random.Random(1)
    for _ in range(2000):
        content = bytes(source.choices([0x61, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x80, 0xFF], k=12))
        whole = by_bytes(content)
        so_far = "".join(told(by_bytes, content))
        assert whole.startswith(so_far)
        assert not whole[len(so_far) :].strip("\ufffd"), "only what may yet become a character is held"


def test_spaces_before_words_are_told() -> None:
    tokenizer, decode = by_words()
    for _ in range(50):
        token_ids = random.Random(_).choices(range(tokenizer.get_vocab_size()), k=8)
        whole = decode(token_ids)
        assert whole.startswith("".join(told(decode, token_ids))), token_ids
    assert told(decode, [0, 1, 5, 4]) == ["so", " it", " was", "."]


def test_what_may_be_a_stop_text_is_held() -> None:
    assert told(by_bytes, b"a < b </q", ["</q>"]) == ["a", " ", "", "< ", "b", " ", "", "", ""]
    assert "".join(told(by_bytes, b"a </q> and so on", ["</q>"])) == "a "
    assert "".join(told(by_bytes, b"aab", ["aaa"])) == "aab"
    assert told(lambda ids: "".join(["a", "b</q>c", "d"][at] for at in ids), [0, 1, 2], ["</q>"]) == ["a", "b", ""]
    assert "".join(told(by_bytes, b"all of it", [""])) == ""


def test_white_space_before_a_call_is_held() -> None:
    text = TextInPieces(by_bytes, ["<tool_call>"], trims=True)
    assert [text.add([token_id]) for token_id in b"a \n b \n<tool_call>"][:5] == ["a", "", "", "", " \n b"]
    assert text.sent == "a \n b"
