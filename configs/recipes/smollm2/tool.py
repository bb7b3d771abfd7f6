"""The recipe's environment of several turns: products of numbers, with a calculator that the policy asks in a form which a small model can write."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hpcrl.envs.base import Environment, Turn
from hpcrl.envs.rewards.response import ground_truth, truth_of

_CALL = re.compile(r"calc: (\d{1,6}) \* (\d{1,6})")


class Calculator(Environment):
    """Multiply two numbers with a calculator.

    A turn that is `calc: 467 * 193` is answered by a message of the role `tool` with the product. Any other turn ends the sample: reward 1
    if it is the ground truth, `It is 90131`, and nothing else; otherwise 0.

    Args:
        extras: `reward_spec.ground_truth` is the right answer.

    Raises:
        DataError: the row has no ground truth.
    """

    def __init__(self, extras: Mapping[str, Any]) -> None:
        self._expected = ground_truth(truth_of(extras))
        self._calls = 0

    def step(self, action: str) -> Turn:
        call = _CALL.fullmatch(action)
        if call is not None:
            self._calls += 1
            product = int(call[1]) * int(call[2])
            return Turn([{"role": "tool", "content": str(product)}], 0.0, done=False, metrics={"calls": self._calls})
        return Turn([], float(action == self._expected), done=True, metrics={"calls": self._calls})
