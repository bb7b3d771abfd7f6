"""The registry of rewards, each known by a name, or a user's own, and their weighted sum."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hpcrl.config import EnvironmentConfig
from hpcrl.config.import_path import find
from hpcrl.envs.base import Turn, finite, user_code
from hpcrl.envs.rewards.answers import after_thought, formula_of, last_box
from hpcrl.envs.rewards.boxed import boxed_math
from hpcrl.envs.rewards.images import brightness, redness, symmetry
from hpcrl.envs.rewards.numbers import direct_math, expected_form, expected_number, gsm8k
from hpcrl.envs.rewards.response import Response, Reward, ground_truth
from hpcrl.envs.rewards.rubric import rubric_judge
from hpcrl.envs.rewards.tags import answer_in, single_choice, well_formed
from hpcrl.errors import DataError


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


def by_data_source(response: Response, environment: EnvironmentConfig) -> float:
    r"""Return the reward that belongs to the row's `data_source`, as verl's default_compute_score chooses its score.

    It is gsm8k for openai/gsm8k, boxed_math for MATH, where an answer without \boxed{…} is wrong, and direct_math for math_dapo, math
    and aime. They differ from verl's scores where an answer is written in another form than the ground truth (docs/rewards.md).

    Formula:
        `gsm8k`, `boxed_math` or `direct_math`, by the row's `data_source`
    Use:
        datasets that were prepared for verl
    Raises:
        DataError: no reward belongs to the data source, or the row has no ground truth for it.
    """
    name = reward_of(BY_DATA_SOURCE, response.data_source)
    if name == "boxed_math" and last_box(after_thought(response.text)) is None:
        return 0.0
    return REWARDS[name](response, environment)


REWARDS: dict[str, Reward] = {
    "single_choice": single_choice,
    "boxed_math": boxed_math,
    "gsm8k": gsm8k,
    "direct_math": direct_math,
    "by_data_source": by_data_source,
    "format": well_formed,
    "overlong": overlong,
    "rubric_judge": rubric_judge,
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


BY_DATA_SOURCE = "by_data_source"
_BY_DATA_SOURCE = {
    "openai/gsm8k": "gsm8k",
    **dict.fromkeys(("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"), "boxed_math"),
    **dict.fromkeys(("math_dapo", "math", "math_dapo_reasoning"), "direct_math"),
}


def reward_of(name: str, data_source: str) -> str:
    """Return the name of the reward of a row: of by_data_source the one that it chooses, otherwise `name`.

    Raises:
        DataError: no reward belongs to the data source.
    """
    if name != BY_DATA_SOURCE:
        return name
    if data_source.startswith("aime"):
        return "direct_math"
    if data_source not in _BY_DATA_SOURCE:
        known = ", ".join(_BY_DATA_SOURCE)
        raise DataError(
            f"no reward belongs to the data_source {data_source!r:.80}; by_data_source knows {known} and aime…; write a reward "
            "function for it (docs/rewards.md)"
        )
    return _BY_DATA_SOURCE[data_source]


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
