"""Thoughts and texts of responses: the same whole and in pieces."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from hpcrl.rollout.endpoint.thoughts import Thoughts, count_thought, divided


def decode(token_ids: Sequence[int]) -> str:
    return bytes(token_ids).decode()


@pytest.mark.parametrize(
    ("prompt", "said", "thought", "text"),
    [
        ("assistant\n", "<think>\nhm\n</think>\n\nso ", "hm", "so "),
        ("assistant\n", "\n<think>a  b </thin </think>c", "a  b </thin", "c"),
        ("assistant\n<think>\n", "hm\n</think>\n\nso", "hm", "so"),
        ("assistant\n<think>\n\n</think>\n\n", " so", "", " so"),
        ("assistant\n", "<think>\n\n</think>\n\nso", "", "so"),
        ("assistant\n", "<think> hm </thi", "hm </thi", ""),
        ("<think>", "hm", "hm", ""),
        ("", " so <think>hm</think>", "", " so <think>hm</think>"),
        ("", "so</think>", "", "so</think>"),
        ("", "<thi", "", "<thi"),
        ("", "[THINK]a[/THINK]b</think>", "a", "b</think>"),
        ("", "", "", ""),
    ],
)
def test_a_response_is_divided(prompt: str, said: str, thought: str, text: str) -> None:
    before = list(prompt.encode())
    assert divided(decode, before, said) == (thought, text)
    for seed in range(20):
        thoughts, chance, at, found = Thoughts(decode, before), random.Random(seed), 0, list[tuple[str, str]]()
        while at < len(said):
            size = chance.randint(1, 4)
            found.append(thoughts.add(said[at : at + size]))
            at += size
        found.append(thoughts.end())
        assert tuple(map("".join, zip(*found, strict=True))) == (thought, text)


@pytest.mark.parametrize(
    ("prompt", "pieces", "count"),
    [
        ("assistant\n", ["<think>", "\nhm", "\n</think>", "\n\nso"], 3),
        ("assistant\n", ["<think>", "hm </thi", "nk>\n\n", "so"], 3),
        ("assistant\n<think>\n", ["a", "b</think>so", "</think>"], 2),
        ("assistant\n", ["<think>", "\n\n", "</think>", "\n\nso"], 3),
        ("assistant\n", ["<think>", "hm", " and"], 3),
        ("assistant\n", ["so", "<think>", "hm", "</think>"], 0),
        ("assistant\n", ["so"], 0),
        ("assistant\n<think>\n", [], 0),
    ],
)
def test_tokens_of_a_thought_are_counted_with_its_marks(prompt: str, pieces: list[str], count: int) -> None:
    texts = [prompt, *pieces]

    def decode_pieces(token_ids: Sequence[int]) -> str:
        return "".join(texts[one] for one in token_ids)

    assert count_thought(decode_pieces, [0], range(1, len(texts))) == count


@pytest.mark.parametrize(
    ("pieces", "most"),
    [
        (["<think>", *["hm"] * 9_000, "</thi", "nk>", *["so"] * 9_000], 1.5 * 9_003),
        (["<think>", *["hm"] * 9_000], 2.5 * 9_001),
        (["so"] * 9_000, 1_000),
        ([" "] * 700 + ["<thi", "nk>", *["hm"] * 700, "</think>", "so"], 3 * 1_404),
    ],
    ids=["thought", "no end", "none", "after spaces"],
)
def test_tokens_of_a_long_response_are_decoded_about_once(pieces: list[str], most: float) -> None:
    """It is counted in the event loop, where all other samples wait."""
    decoded = list[int]()

    def decode_pieces(token_ids: Sequence[int]) -> str:
        decoded.append(len(token_ids))
        return "".join(pieces[one] for one in token_ids)

    ends = [at + 1 for at, piece in enumerate(pieces) if piece in ("nk>", "</think>")]
    expected = 0 if pieces[0] == "so" else ends[-1] if ends else len(pieces)
    assert count_thought(decode_pieces, [], range(len(pieces))) == expected
    assert sum(decoded) <= most
