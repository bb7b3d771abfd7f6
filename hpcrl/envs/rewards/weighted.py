"""The registry of rewards, each known by a name, or a user's own, and their weighted sum."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hpcrl.config import EnvironmentConfig
from hpcrl.config.import_path import find
from hpcrl.envs.base import Turn, finite, user_code
from hpcrl.envs.rewards.answers import formula_of
from hpcrl.envs.rewards.boxed import boxed_math
from hpcrl.envs.rewards.images import brightness, redness, symmetry
from hpcrl.envs.rewards.numbers import direct_math, expected_form, expected_number, gsm8k
from hpcrl.envs.rewards.response import Response, Reward, ground_truth
from hpcrl.envs.rewards.tags import answer_in, single_choice, well_formed


def overlong(response: Response, environment: EnvironmentConfig) -> float:
    """Return a penalty on a response that ends in the last `buffer_length` tokens, from 0 down to -penalty_factor.

    With n tokens, at most L, and a buffer of b tokens: -penalty_factor * min(max(n - (L - b), 0), b) / b (DAPO, arXiv:2503.14476,
    equation 13). The tokens are those that the policy chose; Cosmos-RL encodes the text again, which may give others, and lets the
    penalty grow without bound.

    Formula:
        -penalty_factor × the share of the last buffer_length tokens that was used
    Use:
        answers grow into the limit; its settings are in `environment.overlong_reward`
    """
    settings = environment.overlong_reward
    exceeding = response.n_tokens - (response.max_tokens - settings.buffer_length)
    return -settings.penalty_factor * min(max(exceeding, 0), settings.buffer_length) / settings.buffer_length


REWARDS: dict[str, Reward] = {
    "single_choice": single_choice,
    "boxed_math": boxed_math,
    "gsm8k": gsm8k,
    "direct_math": direct_math,
    "format": well_formed,
    "overlong": overlong,
    "redness": redness,
    "brightness": brightness,
    "symmetry": symmetry,
}

GROUND_TRUTHS: dict[str, Callable[[Any], object]] = {
    "single_choice": ground_truth,
    "boxed_math": ground_truth,
    "gsm8k": expected_number,
    "direct_math": expected_form,
}
"""How each reward that compares reads a ground truth; it raises DataError where it cannot.

Whether boxed_math can read a formula is not looked at here: that takes a process with math-verify.
"""


def solution(name: str, truth: Any) -> str:
    """Return a response with a ground truth as its answer, in the form that a reward of `GROUND_TRUTHS` reads; it must be worth 1.

    Raises:
        DataError: the row has no ground truth.
    """
    text = ground_truth(truth)
    match name:
        case "boxed_math":
            formula = formula_of(text)
            return text if formula is None else f"\\boxed{{{formula}}}"
        case "gsm8k":
            return text if "#### " in text else f"#### {text.strip()}"
        case "direct_math":
            return f"Answer: {text}"
        case "single_choice":
            return f"<answer>{answer_in(text)}</answer>"
    raise AssertionError(name)


class WeightedRewards:
    """Pays a response the weighted sum of rewards, and reports each of them.

    Args:
        weights: a name in `REWARDS`, or "package.module:function" for a user's own, to its weight; 0: only reported.
        setting: dotted path of the weights, for errors.
    """

    def __init__(self, setting: str, weights: Mapping[str, float], environment: EnvironmentConfig) -> None:
        self._functions = {name: find(setting, name, REWARDS) for name in weights}
        self._weights, self._environment = weights, environment

    def __call__(self, response: Response) -> Turn:
        """Return the reward, with each reward's own value, unweighted, among the metrics.

        Raises:
            HpcrlError: a reward failed; UserCodeError also where it is no finite number. The message names it.
        """
        values = {name: self._value(name, reward, response) for name, reward in self._functions.items()}
        total = sum(self._weights[name] * value for name, value in values.items())
        return Turn([], total, done=True, metrics=values)

    def _value(self, name: str, reward: Reward, response: Response) -> float:
        with user_code(f"reward {name!r}"):
            return finite(reward(response, self._environment))
