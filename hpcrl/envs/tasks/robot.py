"""A robot in a simulator: the policy sees measurements and camera images, answers with actions as numbers, and gets a reward when the task
is done."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hpcrl.config.sections.environment import RobotConfig
from hpcrl.envs.base import Environment, Messages, Turn
from hpcrl.envs.simulators.process import SimulatorPool, SimulatorProcess, pool_of
from hpcrl.envs.tools.columns import lacking, whole_number
from hpcrl.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

    from hpcrl.envs.simulators.base import Bounds, Observation

STATE_APART = "state_apart"
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class Robot(Environment):
    """Do a task in a simulator, action by action.

    Several turns; generator.max_turns is how many there are. Reward 1 in the turn in which the task is done, which ends the sample. A turn says
    environment.skyrl_gym.robot.actions_per_turn actions, one after the other; what is missing or no number moves nothing.

    Args:
        extras: `seed`, a whole number that determines the initial state: the samples of a group begin alike. `task`, an object
            that the simulator's reset gets, where it wants one. STATE_APART, of the generator: measurements are shown beside images, as
            numbers.

    Raises:
        ConfigError: no simulator is set.
        DataError: the row lacks a seed.
    """

    def __init__(self, extras: Mapping[str, Any]) -> None:
        self._config: RobotConfig = extras["skyrl_gym"].robot
        if self._config.simulator is None:
            raise ConfigError("environment.skyrl_gym.robot.simulator: required by robot: what is to be simulated")
        self._seed, self._task = whole_number("robot", extras, "seed"), extras.get("task") or {}
        if self._seed < 0:
            raise lacking("robot", "seed", "a whole number of at least 0", self._seed)
        if not isinstance(self._task, Mapping):
            raise lacking("robot", "task", "an object, or nothing", self._task)
        self._seconds, self._state_apart = extras["environment"].timeout_seconds, bool(extras.get(STATE_APART))
        self._pool: SimulatorPool | None = None
        self._simulator: SimulatorProcess | None = None
        self._asked_for: Messages = []
        self._actions = self._valid = 0

    def begin(self) -> tuple[Observation, Bounds]:
        """Begin for a policy that reads no messages: return what is seen, and the bounds of actions and states."""
        config = self._config
        assert config.simulator is not None
        self._pool = pool_of(config.simulator, config.options, self._seconds)
        self._simulator = self._pool.take()
        return self._simulator.reset(self._seed, self._task), self._simulator.bounds

    def init(self, messages: Messages) -> Messages:
        seen, _ = self.begin()
        self._asked_for = messages
        return self._asked(seen)

    def _asked(self, seen: Observation) -> Messages:
        *before, last = self._asked_for
        return [*before, {**last, "content": self._told(seen, last["content"])}]

    def step(self, action: str) -> Turn:
        assert self._simulator is not None
        bounds, config = self._simulator.bounds, self._config
        size = len(bounds.action_low)
        numbers = [float(number) for number in _NUMBER.findall(action)]
        said = [numbers[at * size : (at + 1) * size] for at in range(config.actions_per_turn)]
        seen, turn = self.move(
            [action_of(one, bounds, config.action_bins) if len(one) == size else None for one in said]
        )
        return turn if turn.done else replace(turn, observations=[{"role": "user", "content": self._told(seen)}])

    def act(self, actions_KA: np.ndarray) -> Turn:
        assert self._simulator is not None
        bounds = self._simulator.bounds
        if actions_KA.shape[1] != len(bounds.action_low):
            raise ConfigError(
                f"generator.sampling_params.max_generate_length: the policy's actions have {actions_KA.shape[1]} numbers, and those of the "
                f"simulator {len(bounds.action_low)}; set it to that many times environment.skyrl_gym.robot.actions_per_turn"
            )
        seen, turn = self.move(list(actions_KA.clip(bounds.action_low, bounds.action_high)))
        return replace(turn, observations=self._asked(seen))

    def move(self, actions: Sequence[np.ndarray | None]) -> tuple[Observation, Turn]:
        """Move by actions [A] within their bounds until the task is done; return what is seen then, and the turn without messages.

        Args:
            actions: None moves nothing, as near to 0 as the bounds allow, and is no valid one.
        """
        assert self._simulator is not None
        seen: Observation | None = None
        for action in actions:
            self._actions, self._valid = self._actions + 1, self._valid + (action is not None)
            seen = self._simulator.step(_still(self._simulator.bounds) if action is None else action)
            if seen.success or seen.ended:
                break
        assert seen is not None
        metrics = {
            "success": float(seen.success),
            "actions": float(self._actions),
            "valid_actions": self._valid / self._actions,
        }
        return seen, Turn([], float(seen.success), seen.success or seen.ended, metrics)

    def _told(self, seen: Observation, task: Any = "") -> Any:
        """Return the content of a message: images first, then the task, then the state."""
        assert self._simulator is not None
        bins, bounds = self._config.state_bins, self._simulator.bounds
        state = written_state(seen.state, bounds, bins) if self._config.show_state else ""
        if isinstance(task, str) and not seen.images:
            return task + state
        from PIL import Image

        images = [{"type": "image", "image": Image.fromarray(image)} for image in seen.images.values()]
        if self._state_apart:
            images.append({"type": "state", "state": seen.state.tolist()})
        texts = [{"type": "text", "text": task + state}] if isinstance(task, str) else task
        return [*images, *texts, *([{"type": "text", "text": state}] if texts is task and state else [])]

    def close(self) -> None:
        if self._pool is not None and self._simulator is not None:
            self._pool.give_back(self._simulator)
            self._simulator = None


def action_of(said: Sequence[float], bounds: Bounds, bins: int | None) -> np.ndarray:
    """Return an action [A] within its bounds.

    Args:
        said: [A] numbers as they are, or with `bins` the numbers of bins, which divide what lies between the bounds evenly and stand for their
            middles, as OpenVLA's do (arXiv:2406.09246).
    """
    import numpy as np

    low, high = bounds.action_low, bounds.action_high
    values = np.asarray(said)
    if bins is not None:
        values = low + (np.clip(np.round(values), 0, bins - 1) + 0.5) * (high - low) / bins
    return np.clip(values, low, high)


def _still(bounds: Bounds) -> np.ndarray:
    """Return the action that moves nothing, as near to 0 as the bounds allow."""
    return (0.0 * bounds.action_low).clip(bounds.action_low, bounds.action_high)


def written_state(state: np.ndarray, bounds: Bounds, bins: int | None) -> str:
    """Return a state [D] as the policy reads it: numbers with two decimals, or the numbers of bins."""
    if bins is None:
        return " ".join(f"{value:.2f}" for value in state)
    share = (state - bounds.state_low) / (bounds.state_high - bounds.state_low)
    return " ".join(str(int(place)) for place in (share * bins).clip(0, bins - 1))
