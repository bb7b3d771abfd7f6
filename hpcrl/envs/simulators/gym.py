"""Simulators behind gymnasium's interface: gymnasium's own, ManiSkill's, and all others that register themselves there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np

from hpcrl.envs.simulators.base import Observation, Simulator
from hpcrl.errors import ConfigError

_WHERE = "environment.skyrl_gym.robot.options"
_SUCCESS = ("is_success", "success")
"""What an environment's info calls it, as Gymnasium-Robotics and ManiSkill do."""


class Gymnasium(Simulator):
    """An environment of gymnasium whose actions are vectors of numbers.

    Args:
        options: `id`, as gymnasium.make takes it ("module:id" imports the module that registers it). `camera`: whether frames are
            rendered. `success`: the info's key of success, unless given is_success or success. All others go to gymnasium.make.

    Raises:
        ConfigError: the options or the environment are not such.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        given = dict(options)
        name, self._camera, self._success = (
            given.pop("id", None),
            given.pop("camera", False),
            given.pop("success", None),
        )
        if not isinstance(name, str):
            raise ConfigError(f"{_WHERE}: `id` names the environment of gymnasium, found {name!r}")
        try:
            self._environment = gymnasium.make(name, render_mode="rgb_array" if self._camera else None, **given)
        except (gymnasium.error.Error, ModuleNotFoundError, TypeError) as error:
            raise ConfigError(f"{_WHERE}: gymnasium cannot make {name!r}: {error}") from error
        actions, states = self._environment.action_space, self._environment.observation_space
        if not isinstance(actions, gymnasium.spaces.Box) or not np.isfinite([actions.low, actions.high]).all():
            raise ConfigError(f"{_WHERE}: expected bounded numbers as actions of {name}, found {actions}")
        self.action_low, self.action_high = actions.low.ravel(), actions.high.ravel()
        self._shape = actions.shape
        flat = gymnasium.spaces.flatten_space(states)
        if not isinstance(flat, gymnasium.spaces.Box):
            raise ConfigError(f"{_WHERE}: expected numbers as observations of {name}, found {states}")
        self._states, self.state_low, self.state_high = states, flat.low, flat.high

    def reset(self, seed: int, task: Mapping[str, Any]) -> Observation:
        seen, info = self._environment.reset(seed=seed, options=dict(task) or None)
        return self._observed(seen, info, ended=False)

    def step(self, action: np.ndarray) -> Observation:
        seen, _, terminated, truncated, info = self._environment.step(action.astype(np.float32).reshape(self._shape))
        return self._observed(seen, info, ended=bool(terminated or truncated))

    def close(self) -> None:
        self._environment.close()

    def _observed(self, seen: Any, info: Mapping[str, Any], *, ended: bool) -> Observation:
        images = {"camera": np.asarray(self._environment.render(), np.uint8)} if self._camera else {}
        state = np.asarray(gymnasium.spaces.flatten(self._states, seen), np.float64)
        return Observation(state, images, self._is_success(info), ended)

    def _is_success(self, info: Mapping[str, Any]) -> bool:
        names = _SUCCESS if self._success is None else (self._success,)
        return any(bool(np.any(info[name])) for name in names if name in info)
