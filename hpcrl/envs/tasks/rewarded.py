"""Environments of one turn whose reward is one of docs/rewards.md, each for rows that name it in their column `env_class`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from hpcrl.config import EnvironmentConfig
from hpcrl.envs.base import Environment, Turn
from hpcrl.envs.rewards.response import Response, truth_of
from hpcrl.envs.rewards.weighted import GROUND_TRUTHS, REWARDS, solution

_SETTINGS = EnvironmentConfig()  # these rewards have none


class Rewarded(Environment):
    """One turn, with the reward of that name.

    Args:
        extras: `reward_spec.ground_truth` is what the answer is compared with, if the reward compares.

    Attributes:
        reward: its name in `REWARDS`.

    Raises:
        DataError: the row has no ground truth that the reward can use.
    """

    reward: ClassVar[str]

    def __init__(self, extras: Mapping[str, Any]) -> None:
        self._truth = truth_of(extras)
        if self.reward in GROUND_TRUTHS:
            GROUND_TRUTHS[self.reward](self._truth)

    def solution(self) -> str | None:
        return solution(self.reward, self._truth) if self.reward in GROUND_TRUTHS else None

    def step(self, action: str) -> Turn:
        value = REWARDS[self.reward](Response(text=action, ground_truth=self._truth), _SETTINGS)
        return Turn([], value, done=True)


class GSM8K(Rewarded):
    """Solve a word problem; the number after `#### ` counts."""

    reward = "gsm8k"


class Math(Rewarded):
    """Solve a problem; what \\boxed{…} holds counts, compared by computer algebra."""

    reward = "boxed_math"


class SingleChoice(Rewarded):
    """Choose; what <answer>…</answer> holds counts, as a text."""

    reward = "single_choice"


class DirectMath(Rewarded):
    """Solve a problem; the line after `Answer:` counts, 1 or -1."""

    reward = "direct_math"


class Format(Rewarded):
    """Answer in the form <think>…</think>, empty line, <answer>…</answer>, with any answer."""

    reward = "format"
