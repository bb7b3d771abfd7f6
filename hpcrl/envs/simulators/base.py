"""Interface of a robot simulator: reset, step by actions, observations, and whether the task is done."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True)
class Observation:
    """What a simulator shows.

    Attributes:
        state: [D] float, what is measured of the robot and, where the simulator tells it, of its task.
        images: of each camera by its name, [height, width, 3] uint8; empty: no camera is asked for.
        success: whether the task is done.
        ended: whether nothing can be done any more.
    """

    state: np.ndarray
    images: dict[str, np.ndarray] = field(default_factory=dict)
    success: bool = False
    ended: bool = False


class Simulator(Protocol):
    """One robot and its task, made by calling its class with environment.skyrl_gym.robot.options, in a process of its own.

    Attributes:
        action_low, action_high: [A] float, bounds of an action's numbers.
        state_low, state_high: [D] float, those of a state; infinite where there are none.
    """

    action_low: np.ndarray
    action_high: np.ndarray
    state_low: np.ndarray
    state_high: np.ndarray

    @abstractmethod
    def reset(self, seed: int, task: Mapping[str, Any]) -> Observation:
        """Reset the simulator; the same seed and task give the same state.

        Args:
            task: the column `task` of the row, which says what is to be done where the simulator has several tasks.
        """
        ...

    @abstractmethod
    def step(self, action: np.ndarray) -> Observation:
        """Move by an action [A] within its bounds."""
        ...

    def close(self) -> None:
        """Give back what the simulator holds; called once, at the end."""
        return


@dataclass(frozen=True)
class Bounds:
    """Bounds of a simulator, as its process reports them."""

    action_low: np.ndarray
    action_high: np.ndarray
    state_low: np.ndarray
    state_high: np.ndarray

    @classmethod
    def of(cls, simulator: Simulator) -> Bounds:
        return cls(simulator.action_low, simulator.action_high, simulator.state_low, simulator.state_high)
