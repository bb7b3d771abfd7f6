"""GSM8K with further tries: after a wrong answer the environment returns feedback, and the policy may try again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcrl.envs.base import Environment, Turn
from hpcrl.envs.rewards.numbers import expected_number, final_number
from hpcrl.envs.rewards.response import truth_of
from hpcrl.envs.rewards.weighted import solution

WRONG = "That is not the answer. Find the mistake, and end with `#### ` and the right number."
NO_ANSWER = "There is no answer yet. End with `#### ` and the number."


class GSM8KMultiTurn(Environment):
    """Solve a word problem in several tries; the number after `#### ` counts.

    Several turns. A right answer in the k-th has reward 1/k (as the reward `gsm8k` compares) and ends the sample; a wrong one has 0.
    generator.max_turns is how many tries there are.

    Args:
        extras: `reward_spec.ground_truth`, a number or a text with one after `#### `.

    Raises:
        DataError: the row has no ground truth, or there is no number in it.
    """

    def __init__(self, extras: Mapping[str, Any]) -> None:
        self._truth = truth_of(extras)
        self._expected = expected_number(self._truth)
        self._tries = 0

    def solution(self) -> str | None:
        return solution("gsm8k", self._truth)

    def step(self, action: str) -> Turn:
        found = final_number(action)
        right = found == self._expected
        self._tries += 1
        metrics = {"right": float(right), "right_at_once": float(right and self._tries == 1), "tries": self._tries}
        if right:
            return Turn([], 1 / self._tries, done=True, metrics=metrics)
        feedback = NO_ANSWER if found is None else WRONG
        return Turn([{"role": "user", "content": feedback}], 0.0, done=False, metrics=metrics)
