"""Tasks about the letters of a word, which is what a policy that reads whole tokens does not see."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any
from unicodedata import normalize

from hpcrl.envs.base import Environment, Turn
from hpcrl.envs.rewards.tags import answer_in
from hpcrl.envs.tasks.arithmetic import answered
from hpcrl.envs.tools.columns import lacking, word


class ReverseWord(Environment):
    """Write a word backwards.

    One turn, reward 1 or 0. The answer is what the first <answer>…</answer> holds, or else the whole text; letter case counts, and
    é is one letter however it is encoded.

    Args:
        extras: `word`.

    Raises:
        DataError: the row has no word, or it has other characters than letters.
    """

    def __init__(self, extras: Mapping[str, Any]) -> None:
        self._expected = word("reverse_word", extras, "word")[::-1]

    def step(self, action: str) -> Turn:
        return Turn([], float(normalize("NFC", answer_in(action)) == self._expected), done=True)


class CountLetters(Environment):
    """Return how often a letter is in a word.

    One turn, reward 1 or 0. The answer is the number in the first <answer>…</answer>, or else the whole text. Capital and small
    letters are the same.

    Args:
        extras: `word` and `letter`.

    Raises:
        DataError: the row lacks one of them, or the letter is not one letter.
    """

    def __init__(self, extras: Mapping[str, Any]) -> None:
        letter = word("count_letters", extras, "letter").casefold()
        if len(letter) != 1:
            raise lacking("count_letters", "letter", "one letter", extras["letter"])
        self._expected = Decimal(word("count_letters", extras, "word").casefold().count(letter))

    def step(self, action: str) -> Turn:
        return Turn([], float(answered(action, self._expected)), done=True)
