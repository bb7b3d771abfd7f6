"""Plays environments of SkyRL-Gym as hpcrl's: classes made from `(env_config, extras)`, whose `init` and `step` return its pairs and dictionaries.

They are recognized by their constructor, so that the package skyrl_gym need not be installed. The interface is that of
skyrl_gym/envs/base_text_env.py, and what its caller does with it that of SkyRL's SkyRLGymGenerator.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from functools import cache
from numbers import Real
from typing import Any

from hpcrl.envs.base import Environment, Messages, Turn
from hpcrl.errors import UserCodeError


@cache  # asked for each sample
def is_of_skyrl_gym(found: type) -> bool:
    """Return whether the constructor of an environment's class takes `env_config`, as SkyRL-Gym's do and hpcrl's do not."""
    return "env_config" in inspect.signature(found).parameters


class SkyRLGymEnvironment(Environment):
    """An environment of SkyRL-Gym.

    Its metrics are the numbers of its `get_metrics`, where it has that method. The metadata of `init` and `step` is not read, as in SkyRL.

    Args:
        made: the class.
        extras: its `extras`. Its `env_config` is the table `custom` of them, an OmegaConf DictConfig.
    """

    def __init__(self, made: Any, extras: Mapping[str, Any]) -> None:
        from omegaconf import OmegaConf

        given = dict(extras)
        if "reward_spec" in given:  # rows with reward_model have got this name when they were read
            given.setdefault("reward_model", given["reward_spec"])
        self._environment = made(env_config=OmegaConf.create(dict(extras.get("custom", {}))), extras=given)

    def init(self, messages: Messages) -> Messages:
        found = self._environment.init(copy.deepcopy(messages))  # samples of a group share them, and it may change them
        if not isinstance(found, tuple) or len(found) != 2:
            raise UserCodeError(f"init returned {found!r:.80}; expected a tuple (prompt, metadata), as of SkyRL-Gym")
        return found[0]

    def step(self, action: str) -> Turn:
        found = self._environment.step(action)
        if not isinstance(found, Mapping) or not {"observations", "reward", "done"} <= found.keys():
            raise UserCodeError(
                f"step returned {found!r:.80}; expected a dictionary with observations, reward and done, as SkyRL-Gym's BaseTextEnvStepOutput"
            )
        done = bool(found["done"])
        return Turn(
            observations=[]
            if done
            else found["observations"],  # SkyRL does not look at the last ones: they may be None
            reward=found["reward"],
            done=done,
            metrics=self._metrics(),
            action=found.get("postprocessed_action"),
        )

    def close(self) -> None:
        self._environment.close()

    def _metrics(self) -> dict[str, float]:
        """Return the metrics so far: a sample may end after any turn, and a later turn's values take the place of these."""
        get_metrics = getattr(self._environment, "get_metrics", dict)
        return {name: float(value) for name, value in get_metrics().items() if isinstance(value, Real)}
