"""Guess a number: the environment answers `Higher.` or `Lower.` until it is found."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from hpcrl.envs.base import Environment, Turn
from hpcrl.envs.rewards.numbers import expected_number, number
from hpcrl.envs.rewards.response import truth_of
from hpcrl.envs.rewards.tags import answer_in
from hpcrl.envs.tools.columns import lacking, whole_number

HIGHER, LOWER = "Higher.", "Lower."


class GuessNumber(Environment):
    """Find a number between two others from the answers `Higher.` and `Lower.`.

    Several turns, reward 1 when it is found; generator.max_turns is how many guesses there are. A guess is what the first
    <answer>…</answer> holds, or else the whole text. A text without a whole number of the range gets an error message, and counts as a
    guess.

    Args:
        extras: `low` and `high`, the range, both included; `reward_spec.ground_truth`, the number.

    Raises:
        DataError: the row lacks one of them, or the number is outside the range.
    """

    def __init__(self, extras: Mapping[str, Any]) -> None:
        self._low = whole_number("guess_number", extras, "low")
        self._high = whole_number("guess_number", extras, "high")
        self._secret = expected_number(truth_of(extras))
        if not (self._low <= self._secret <= self._high and _is_whole(self._secret)):
            within = f"a whole number from {self._low} (column `low`) to {self._high} (column `high`) as `ground_truth`"
            raise lacking("guess_number", "reward_spec", within, str(self._secret))
        self._guesses = self._valid = 0

    def solution(self) -> str | None:
        return f"<answer>{self._secret}</answer>"

    def step(self, action: str) -> Turn:
        guess = number(answer_in(action))
        if guess is not None and not (self._low <= guess <= self._high and _is_whole(guess)):
            guess = None
        found = guess == self._secret
        self._guesses += 1
        self._valid += guess is not None
        metrics = {"found": float(found), "guesses": self._guesses, "valid_guesses": self._valid / self._guesses}
        answer = [] if found else [{"role": "user", "content": self._answer(guess)}]
        return Turn(answer, float(found), found, metrics)

    def _answer(self, guess: Decimal | None) -> str:
        if guess is None:
            return f"Say a whole number from {self._low} to {self._high}."
        return HIGHER if guess < self._secret else LOWER


def _is_whole(value: Decimal) -> bool:
    return value == value.to_integral_value()
