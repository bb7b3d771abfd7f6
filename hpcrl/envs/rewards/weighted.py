"""Rewards by name, and their weighted sum."""

from __future__ import annotations

import math
from collections.abc import Mapping

from hpcrl.config import EnvironmentConfig
from hpcrl.config.own import find
from hpcrl.envs.blame import Blame
from hpcrl.envs.environment import Turn
from hpcrl.envs.rewards.boxed import boxed_math
from hpcrl.envs.rewards.length import overlong
from hpcrl.envs.rewards.numbers import direct_math, gsm8k
from hpcrl.envs.rewards.response import Response, Reward
from hpcrl.envs.rewards.tags import single_choice, well_formed
from hpcrl.errors import DataError

REWARDS: dict[str, Reward] = {
    "single_choice": single_choice,
    "boxed_math": boxed_math,
    "gsm8k": gsm8k,
    "direct_math": direct_math,
    "format": well_formed,
    "overlong": overlong,
}


class WeightedRewards:
    """Pays a response the weighted sum of rewards, and reports each of them.

    Args:
        weights: a name in `REWARDS`, or "package.module:function" for a user's own, to its weight; 0: only reported.
        setting: dotted path of the weights, for errors.

    Raises:
        ConfigError: nothing has one of these names.
    """

    def __init__(self, setting: str, weights: Mapping[str, float], environment: EnvironmentConfig) -> None:
        self._functions = {name: find(setting, name, REWARDS) for name in weights}
        self._weights, self._environment = weights, environment

    def __call__(self, response: Response) -> Turn:
        """Return what is paid, with each reward's own value, unweighted, among the metrics.

        Raises:
            HpcrlError: a reward failed, or is no finite number; the message names it.
        """
        values = {name: self._value(name, reward, response) for name, reward in self._functions.items()}
        total = sum(self._weights[name] * value for name, value in values.items())
        return Turn([], total, done=True, metrics=values)

    def _value(self, name: str, reward: Reward, response: Response) -> float:
        with Blame(f"reward {name!r}"):
            value = float(reward(response, self._environment))
            if not math.isfinite(value):
                raise DataError(f"{value}; expected a finite number")
            return value
