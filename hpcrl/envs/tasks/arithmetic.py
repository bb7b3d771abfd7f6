"""Work out an expression: `12 * (7 - 9)` is `-24`."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from hpcrl.envs.base import Environment, Turn
from hpcrl.envs.rewards.numbers import expected_number, number
from hpcrl.envs.rewards.response import truth_of
from hpcrl.envs.rewards.tags import answer_in


def answered(text: str, expected: Decimal) -> bool:
    """Return whether what the first <answer>…</answer> holds, or else the whole text, is the expected number."""
    return number(answer_in(text)) == expected


class Arithmetic(Environment):
    """Work out an expression; the answer must be the number and nothing else.

    One turn, reward 1 or 0. The answer is what the first <answer>…</answer> holds, or else the whole text; numbers are compared
    exactly, however they are written.

    Args:
        extras: `reward_spec.ground_truth` is the number.

    Raises:
        DataError: the row has no ground truth, or it is no number.
    """

    def __init__(self, extras: Mapping[str, Any]) -> None:
        self._expected = expected_number(truth_of(extras))

    def solution(self) -> str | None:
        return f"<answer>{self._expected}</answer>"

    def step(self, action: str) -> Turn:
        return Turn([], float(answered(action, self._expected)), done=True)
