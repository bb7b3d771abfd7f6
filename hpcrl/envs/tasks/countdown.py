"""Make a number from others: 25 from 3, 5, 8 and 9 by `(8 - 3) * 5`; not all need be used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from hpcrl.envs.base import Environment, Turn
from hpcrl.envs.rewards.tags import answer_in
from hpcrl.envs.tools.columns import is_whole, lacking, whole_number
from hpcrl.envs.tools.expression import ExpressionError, evaluate


class Countdown(Environment):
    """Make a number from given ones by + - * /, each used at most once.

    One turn, reward 1 or 0. The answer is the expression in the first <answer>…</answer>, or else the whole text; nothing may stand
    beside it. Division is exact, also between its steps.

    Args:
        extras: `nums`, the numbers, and `target`, what to make of them.

    Raises:
        DataError: the row lacks one of them.
    """

    def __init__(self, extras: Mapping[str, Any]) -> None:
        self._target = whole_number("countdown", extras, "target")
        numbers = extras.get("nums")
        if not isinstance(numbers, list) or not numbers or not all(is_whole(one) and one >= 0 for one in numbers):
            raise lacking("countdown", "nums", "a list of whole numbers, 0 or more each", numbers)
        self._numbers = Counter(numbers)

    def step(self, action: str) -> Turn:
        try:
            found = evaluate(answer_in(action))
        except ExpressionError:
            return Turn([], 0.0, done=True, metrics={"expression": 0.0, "numbers_allowed": 0.0})
        allowed = Counter(found.numbers) <= self._numbers
        metrics = {"expression": 1.0, "numbers_allowed": float(allowed)}
        return Turn([], float(allowed and found.value == self._target), done=True, metrics=metrics)
