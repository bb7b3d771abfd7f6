"""Prefixes that responses of different rewards share: by hand, and against the definition."""

from __future__ import annotations

import random
import time

import pytest

from hpcrl.algorithms.prefixes import maximal_prefixes, shared_prefixes

CASES = {
    "two that part": ([[1, 2, 3], [1, 2, 4]], [0.0, 1.0], [2, 2]),
    "equal rewards": ([[1, 2, 3], [1, 2, 4]], [1.0, 1.0], [0, 0]),
    "too short": ([[1, 3], [1, 4]], [0.0, 1.0], [0, 0]),
    "the longer prefix counts": ([[1, 2, 3, 4, 8], [1, 2, 3, 4, 9], [1, 2, 5]], [0.0, 1.0, 0.5], [4, 4, 0]),
    "two prefixes": ([[1, 2, 3], [4, 5, 6], [1, 2, 4], [4, 5, 7]], [0.0, 1.0, 1.0, 1.0], [2, 0, 2, 0]),
    "three of one": ([[1, 2, 3], [1, 2, 4], [1, 2, 5]], [0.0, 0.0, 1.0], [2, 2, 2]),
    "the same response twice": ([[1, 2, 3], [1, 2, 3]], [0.0, 1.0], [0, 0]),
    "one is the other's beginning": ([[1, 2], [1, 2, 3]], [0.0, 1.0], [0, 2]),
    "empty responses": ([[], [], [1, 2, 3]], [0.0, 1.0, 1.0], [0, 0, 0]),
    "one response": ([[1, 2, 3]], [1.0], [0]),
    "no response": ([], [], []),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_left_out(case: str) -> None:
    responses, rewards, expected = CASES[case]
    assert shared_prefixes(responses, rewards, 2) == expected
    backwards = shared_prefixes(responses[::-1], rewards[::-1], 2)
    assert backwards[::-1] == expected


@pytest.mark.parametrize("seed", range(50))
def test_maximal_prefixes_are_those_of_the_definition(seed: int) -> None:
    """Every prefix of a response, its members, and whether a longer one has two of them."""
    chance = random.Random(seed)
    responses = [[chance.randint(0, 1) for _ in range(chance.randint(0, 6))] for _ in range(chance.randint(0, 8))]
    members = {
        prefix: [at for at, response in enumerate(responses) if tuple(response[: len(prefix)]) == prefix]
        for prefix in {tuple(response[:n]) for response in responses for n in range(len(response) + 1)}
    }
    shared = {prefix for prefix, numbers in members.items() if len(numbers) > 1}
    expected = [
        (len(prefix), members[prefix])
        for prefix in shared
        if len(prefix) >= 2 and not any(longer[:-1] == prefix for longer in shared if longer)
    ]
    assert sorted(maximal_prefixes(responses, 2)) == sorted(expected)


def test_every_sample_keeps_a_token_and_has_one_prefix() -> None:
    chance = random.Random(0)
    for _ in range(200):
        responses = [[chance.randint(0, 1) for _ in range(chance.randint(1, 6))] for _ in range(6)]
        left_out = shared_prefixes(responses, [chance.random() for _ in responses], 1)
        assert all(n < len(response) for n, response in zip(left_out, responses, strict=True))
        groups = maximal_prefixes(responses, 1)
        assert len({at for _, members in groups for at in members}) == sum(len(members) for _, members in groups)


def test_long_responses_take_no_longer_than_their_tokens() -> None:
    """A trie of prefixes that are themselves the keys would hold the square of the tokens."""
    size = 100_000
    responses = [[*range(size), number] for number in range(16)]
    began = time.monotonic()
    assert shared_prefixes(responses, [float(n) for n in range(16)], 1) == [size] * 16
    assert time.monotonic() - began < 10
