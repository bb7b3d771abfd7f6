"""The reward of the recipe's additions: the whole answer is `33 + 25 = 58`, with the right sum."""

from __future__ import annotations

import re

from hpcrl.config import EnvironmentConfig
from hpcrl.envs.rewards.response import Response

_EQUATION = re.compile(r"(\d+) \+ (\d+) = (\d+)")


def addition(response: Response, _environment: EnvironmentConfig) -> float:
    """Return 1 where the answer repeats the question's two numbers and writes their sum, and nothing else; otherwise 0."""
    found = _EQUATION.fullmatch(response.text)
    if found is None:
        return 0.0
    question = response.messages[-1]["content"]
    return float(f"{found[1]} + {found[2]}" == question and found[3] == response.ground_truth)
