"""The tasks of LIBERO (arXiv:2306.03310), where its package is installed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hpcrl.envs.simulators.base import Observation, Simulator
from hpcrl.errors import ConfigError, DataError

_WHERE = "environment.skyrl_gym.robot.options"
_CAMERAS = {"agentview": "agentview_image", "wrist": "robot0_eye_in_hand_image"}
"""Of the option `cameras`, and what LIBERO calls their images."""
_SETTLE = 10  # steps until what was dropped onto the table lies still
_STILL = [0.0] * 6 + [-1.0]


class Libero(Simulator):
    """One task after the other of a suite; an action is LIBERO's, 6 numbers of the arm and 1 of the gripper.

    The state has position (3), rotation as axis times angle (3) and both fingers (2).

    Args:
        options: `suite`, such as libero_10; `cameras`, whose images the policy is shown, ["agentview"] unless given, "wrist" too; `size`,
            height and width of frames, 256 unless given.

    Raises:
        ConfigError: LIBERO is not installed, or has no such suite.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        try:
            from libero.libero import benchmark  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ConfigError(
                f"environment.skyrl_gym.robot.simulator = libero: LIBERO is not installed on this node ({error}): "
                "https://github.com/Lifelong-Robot-Learning/LIBERO"
            ) from error
        suites, name = benchmark.get_benchmark_dict(), options.get("suite")
        if name not in suites:
            raise ConfigError(f"{_WHERE}: `suite` is one of {', '.join(sorted(suites))}, found {name!r}")
        self._suite, self._size = suites[name](), options.get("size", 256)
        self._cameras = options.get("cameras", ["agentview"])
        if not isinstance(self._cameras, list) or not set(self._cameras) <= _CAMERAS.keys():
            raise ConfigError(f"{_WHERE}: `cameras` are some of {', '.join(_CAMERAS)}, found {self._cameras!r}")
        self._environment: Any = None
        self._task = -1
        self.action_low, self.action_high = -np.ones(7), np.ones(7)
        self.state_low, self.state_high = np.full(8, -np.inf), np.full(8, np.inf)

    def reset(self, seed: int, task: Mapping[str, Any]) -> Observation:
        number = task.get("task_id")
        if type(number) is not int or not 0 <= number < self._suite.n_tasks:
            raise DataError(f"robot: column `task`: expected `task_id` below {self._suite.n_tasks}, found {number!r}")
        if number != self._task:
            self._open(number)
        states = self._suite.get_task_init_states(number)
        self._environment.seed(seed)
        self._environment.reset()
        seen = self._environment.set_init_state(states[task.get("init_state", seed) % len(states)])
        for _ in range(_SETTLE):
            seen, *_ = self._environment.step(_STILL)
        return self._observed(seen, success=False)

    def step(self, action: np.ndarray) -> Observation:
        seen, _, done, _ = self._environment.step(action.tolist())
        return self._observed(seen, success=bool(done))

    def close(self) -> None:
        if self._environment is not None:
            self._environment.close()

    def _open(self, number: int) -> None:
        from libero.libero import get_libero_path  # pyright: ignore[reportMissingImports]
        from libero.libero.envs import OffScreenRenderEnv  # pyright: ignore[reportMissingImports]

        self.close()
        task = self._suite.get_task(number)
        file = f"{get_libero_path('bddl_files')}/{task.problem_folder}/{task.bddl_file}"
        self._environment = OffScreenRenderEnv(bddl_file_name=file, camera_heights=self._size, camera_widths=self._size)
        self._task = number

    def _observed(self, seen: Mapping[str, Any], *, success: bool) -> Observation:
        # the simulator's images stand on their heads
        images = {name: np.ascontiguousarray(seen[_CAMERAS[name]][::-1, ::-1]) for name in self._cameras}
        parts = [seen["robot0_eef_pos"], _axis_angle(seen["robot0_eef_quat"]), seen["robot0_gripper_qpos"]]
        return Observation(np.concatenate(parts), images, success, ended=success)


def _axis_angle(quaternion: np.ndarray) -> np.ndarray:
    """Return axis times angle [3] of a rotation (x, y, z, w)."""
    *axis, w = quaternion
    sine = float(np.linalg.norm(axis))
    return np.zeros(3) if sine < 1e-9 else np.array(axis) / sine * 2.0 * np.arctan2(sine, w)
