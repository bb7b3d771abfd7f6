"""Thoughts and texts of responses: the same whole and in pieces."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from hpcrl.rollout.endpoint.thoughts import Thoughts, divided


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
