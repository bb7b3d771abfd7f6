"""A simulator of one number, which an action moves; some actions are too much for it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from hpcrl.envs.simulators.base import Observation, Simulator

RAISES, CRASHES, HANGS = 7.0, 8.0, 9.0


class Troubled(Simulator):
    """The task is to reach 3; a reset begins at the seed."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._step = options["step"]
        self.action_low, self.action_high = -10 * np.ones(1), 10 * np.ones(1)
        self.state_low, self.state_high = np.zeros(2), 100 * np.ones(2)
        self._at = 0.0

    def reset(self, seed: int, task: Mapping[str, Any]) -> Observation:
        self._at = float(seed + task.get("further", 0))
        return self._seen()

    def step(self, action: np.ndarray) -> Observation:
        (by,) = action
        if by == RAISES:
            raise ValueError("too far")
        if by == CRASHES:
            os._exit(3)
        if by == HANGS:
            time.sleep(600)
        self._at += self._step * by
        return self._seen()

    def _seen(self) -> Observation:
        return Observation(np.array([self._at, os.getpid()]), success=self._at == 3.0)


class Failing(Troubled):
    """One that raises in each call of the method that its options name."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__({"step": 0})
        self._fails = options["fails"]

    def reset(self, seed: int, task: Mapping[str, Any]) -> Observation:
        if self._fails == "reset":
            raise ValueError("no room")
        return super().reset(seed, task)

    def step(self, action: np.ndarray) -> Observation:  # noqa: ARG002
        raise ValueError("no power")
