"""The tasks of LIBERO (arXiv:2306.03310), where its package is installed. As a program it writes the rows of a suite:

python -m hpcrl.envs.simulators.libero SUITE FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hpcrl.envs.simulators.base import Observation, Simulator
from hpcrl.errors import ConfigError, DataError

_WHERE = "environment.skyrl_gym.robot.options"
_CAMERAS = {"agentview": "agentview_image", "wrist": "robot0_eye_in_hand_image"}
"""Of the option `cameras`, and what LIBERO calls their images."""
_SETTLE = 10  # steps until what was dropped onto the table lies still
_HALF_OPEN = 0.5
_STILL = [0.0] * 6 + [-1.0]


class Libero(Simulator):
    """One task after the other of a suite; an action is LIBERO's, 6 numbers of the arm and 1 of the gripper.

    The state has position (3), rotation as axis times angle (3) and both fingers (2).

    Args:
        options: `suite`, such as libero_10. `cameras`, whose images the policy gets, ["agentview"] unless given, "wrist" too. `size`,
            height and width of frames, 256 unless given. `gripper`, "openvla" where an action's last number is from 0, closed, to 1, open,
            as OpenVLA's. LIBERO's own is from -1, open, to 1, closed.

    Raises:
        ConfigError: LIBERO is not installed, or has no such suite.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._suite, self._size = suite_of(options.get("suite")), options.get("size", 256)
        self._cameras = options.get("cameras", ["agentview"])
        if not isinstance(self._cameras, list) or not set(self._cameras) <= _CAMERAS.keys():
            raise ConfigError(f"{_WHERE}: `cameras` are some of {', '.join(_CAMERAS)}, found {self._cameras!r}")
        self._gripper = options.get("gripper")
        if self._gripper not in (None, "openvla"):
            raise ConfigError(f'{_WHERE}: `gripper` is "openvla" or left out, found {self._gripper!r}')
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
        if self._gripper is not None:
            action = np.append(action[:-1], -1.0 if action[-1] > _HALF_OPEN else 1.0)
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


def suite_of(name: Any) -> Any:
    """Return a suite of tasks. Raises ConfigError where LIBERO is not installed or has no such suite."""
    try:
        from libero.libero import benchmark  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            f"environment.skyrl_gym.robot.simulator = libero: LIBERO is not installed on this node ({error}): "
            "https://github.com/Lifelong-Robot-Learning/LIBERO"
        ) from error
    suites = benchmark.get_benchmark_dict()
    if name not in suites:
        raise ConfigError(f"{_WHERE}: `suite` is one of {', '.join(sorted(suites))}, found {name!r}")
    return suites[name]()


def write_rows(name: str, folder: Path) -> None:
    """Write a row for each task of a suite and each state that it may begin in, for training and for validation alike, as LIBERO has them."""
    suite, rows = suite_of(name), list[dict[str, Any]]()
    for number in range(suite.n_tasks):
        prompt = [{"role": "user", "content": suite.get_task(number).language}]
        for state in range(len(suite.get_task_init_states(number))):
            task = {"task_id": number, "init_state": state}
            rows.append({"data_source": name, "prompt": prompt, "env_class": "robot", "seed": state, "task": task})
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "validation"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    write_rows(sys.argv[1], Path(sys.argv[2]))
