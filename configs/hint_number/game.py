"""The hinter sees a number and says a letter, the guesser sees the letter and says a number; both are the policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcrl.envs.base import Environment, Turn

LETTERS = "abcdefg"
ASK = "letter: "


class HintNumber(Environment):
    """Reward 1 for both if the guesser says the number that the hinter saw. A hint is the first letter of a to g that the hinter says."""

    def __init__(self, extras: Mapping[str, Any]) -> None:
        self._secret = str(extras["number"])
        self._hint = ""

    def step(self, action: str) -> Turn:
        if not self._hint:
            self._hint = next((letter for letter in action if letter in LETTERS), LETTERS[0])
            return Turn([{"role": "user", "content": ASK + self._hint}], 0.0, done=False, role="hinter", fresh=True)
        found = float(action.strip() == self._secret)
        return Turn([], found, done=True, metrics={"found": found}, role="guesser", rewards={"hinter": found})
