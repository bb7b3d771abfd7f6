"""The tasks of RoboTwin 2.0 (arXiv:2506.18088), two arms on a table, where its checkout is. As a program it writes rows of a task:

python -m hpcrl.envs.simulators.robotwin TASK FOLDER [ROWS] [CHECKOUT]
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from hpcrl.envs.simulators.base import Observation, Simulator
from hpcrl.errors import ConfigError, DataError, UserCodeError

_WHERE, _PATH = "environment.skyrl_gym.robot.options", "ROBOTWIN_PATH"
_CAMERAS = {"head": "head_camera", "left": "left_camera", "right": "right_camera"}
"""Of the option `cameras`, and what RoboTwin calls them; left and right are at the wrists."""
_ARMS = (0, "left"), (1, "right")
_CONFIG = "demo_randomized"
_TURN = 2 * np.pi
_ROWS = 100


class RoboTwin(Simulator):
    """One task after the other; an action is where the joints go, of each arm its angles and then its gripper, from 0, closed, to 1, open.

    The state is of the same form. An arm plans its way by itself, so that an action takes many steps of the physics.

    Args:
        options: `path`, the checkout of RoboTwin, $ROBOTWIN_PATH unless given. `task_config`, a file of its task_config without .yml, with
            robots, cameras and randomization, demo_randomized unless given. `cameras`, whose images the policy gets, ["head"] unless
            given, "left" and "right" too.

    Raises:
        ConfigError: RoboTwin is not there, or has no such configuration.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._cameras = options.get("cameras", ["head"])
        if not isinstance(self._cameras, list) or not set(self._cameras) <= _CAMERAS.keys():
            raise ConfigError(f"{_WHERE}: `cameras` are some of {', '.join(_CAMERAS)}, found {self._cameras!r}")
        wrists = self._cameras != ["head"]
        self._settings = settings_of(
            checkout_of(options.get("path")), options.get("task_config", _CONFIG), wrists=wrists
        )
        arms = [len(self._settings[f"{side}_embodiment_config"]["arm_joints_name"][at]) for at, side in _ARMS]
        self.action_low = np.concatenate([[*[-_TURN] * joints, 0.0] for joints in arms])
        self.action_high = np.concatenate([[*[_TURN] * joints, 1.0] for joints in arms])
        self.state_low, self.state_high = self.action_low, self.action_high
        self._task: Any = None

    def reset(self, seed: int, task: Mapping[str, Any]) -> Observation:
        self.close()
        self._task = begun(task.get("task"), seed, self._settings)
        return self._observed()

    def step(self, action: np.ndarray) -> Observation:
        self._task.take_action(action)
        return self._observed()

    def close(self) -> None:
        if self._task is not None:
            self._task.close_env()
            self._task = None

    def _observed(self) -> Observation:
        return observed(self._task.get_obs(), self._cameras, success=bool(self._task.eval_success))


def observed(found: Mapping[str, Any], cameras: list[str], *, success: bool) -> Observation:
    """Return what RoboTwin shows as policies are shown it."""
    images = {name: np.asarray(found["observation"][_CAMERAS[name]]["rgb"], np.uint8) for name in cameras}
    return Observation(np.asarray(found["joint_action"]["vector"], np.float64), images, success, ended=success)


def checkout_of(path: str | None) -> Path:
    """Make the modules of RoboTwin's checkout importable and return it. It becomes the folder of the process: RoboTwin's paths are relative.

    Raises:
        ConfigError: it is not there, or what it needs is not installed.
    """
    found = Path(path or os.environ.get(_PATH) or "")
    if not (path or os.environ.get(_PATH)) or not (found / "envs" / "_base_task.py").is_file():
        raise ConfigError(
            f"environment.skyrl_gym.robot.simulator = robotwin: expected a checkout of RoboTwin in options.path or ${_PATH}, found "
            f"{path or os.environ.get(_PATH)!r}: https://github.com/RoboTwin-Platform/RoboTwin"
        )
    found = found.absolute()
    sys.path[:0] = [str(found), str(found / "description" / "utils")]
    os.chdir(found)
    os.environ["ASSETS_PATH"] = os.environ.get("ASSETS_PATH") or str(found)
    try:
        importlib.import_module("envs._base_task")
    except ImportError as error:
        raise ConfigError(
            f"environment.skyrl_gym.robot.simulator = robotwin: {found} cannot be imported on this node ({error}); install what its "
            "script/_install.sh does"
        ) from error
    return found


def settings_of(checkout: Path, name: str, *, wrists: bool = False) -> dict[str, Any]:
    """Return what a task is set up with: a file of task_config, and what it names of robots and cameras, as RoboTwin's own evaluation has it.

    Args:
        wrists: the cameras at the wrists show something too.

    Raises:
        ConfigError: there is no such file, or it names what RoboTwin does not have.
    """
    folder = checkout / "task_config"
    if not (folder / f"{name}.yml").is_file():
        known = ", ".join(sorted(path.stem for path in folder.glob("[!_]*.yml")))
        raise ConfigError(f"{_WHERE}: `task_config` is one of {known}, found {name!r}")
    settings, robots = _read(folder / f"{name}.yml"), _read(folder / "_embodiment_config.yml")
    named, camera = settings.get("embodiment", []), settings.get("camera", {}).get("head_camera_type")
    if len(named) not in (1, 3) or not {named[0], named[-2:][0]} <= robots.keys():
        raise ConfigError(
            f"{_WHERE}: `embodiment` of {name}.yml: expected a robot, or two and their distance, found {named}"
        )
    left, right = (checkout / robots[robot]["file_path"] for robot in (named[0], named[-2:][0]))
    size = _read(folder / "_camera_config.yml")[camera]
    return {
        **settings,
        "camera": {**settings["camera"], "collect_head_camera": True, "collect_wrist_camera": wrists},
        "data_type": {**settings.get("data_type", {}), "rgb": True, "qpos": True},
        "render_freq": 0,
        "eval_video_log": False,
        "head_camera_h": size["h"],
        "head_camera_w": size["w"],
        "left_robot_file": str(left),
        "right_robot_file": str(right),
        "dual_arm_embodied": len(named) == 1,
        **({"embodiment_dis": named[2]} if len(named) > 1 else {}),
        "left_embodiment_config": _read(left / "config.yml"),
        "right_embodiment_config": _read(right / "config.yml"),
        # turns end an episode, not RoboTwin
        "eval_mode": False,
    }


def _read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def begun(name: Any, seed: int, settings: Mapping[str, Any]) -> Any:
    """Return a task of RoboTwin in its first state.

    Raises:
        DataError: there is no such task.
        UserCodeError: things do not lie still with this seed.
    """
    if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
        raise DataError(f"robot: column `task`: expected `task`, the name of a task of RoboTwin, found {name!r}")
    try:
        task = getattr(importlib.import_module(f"envs.{name}"), name)()
    except (ImportError, AttributeError) as error:
        raise DataError(f"robot: column `task`: RoboTwin has no task {name!r} ({error})") from error
    unstable: Any = importlib.import_module("envs.utils.create_actor").UnStableError
    try:
        task.setup_demo(now_ep_num=seed, seed=seed, is_test=True, **{**settings, "task_name": name})
    except unstable as error:
        task.close_env()
        raise UserCodeError(
            f"RoboTwin, task {name}, seed {seed}: {error}; write rows with seeds that it can do"
        ) from error
    task.step_lim = None  # what a task sets for its own evaluation
    return task


def write_rows(name: str, folder: Path, count: int, checkout: str | None = None) -> None:
    """Write rows of a task for training and validation, each with a seed that RoboTwin's own planner solves, and its instruction."""
    path = checkout_of(checkout)
    settings, rows, seed = settings_of(path, _CONFIG), list[dict[str, Any]](), 0
    described: Any = importlib.import_module("generate_episode_instructions")
    while len(rows) < 2 * count:
        seed += 1
        try:
            task = begun(name, seed, settings)
        except UserCodeError:
            continue
        told = task.play_once()
        done = bool(task.plan_success and task.check_success())
        task.close_env()
        if done:
            (text, *_) = described.generate_episode_descriptions(name, [told["info"]], 1)[0]["seen"]
            prompt = [{"role": "user", "content": text}]
            rows.append(
                {"data_source": name, "prompt": prompt, "env_class": "robot", "seed": seed, "task": {"task": name}}
            )
    folder.mkdir(parents=True, exist_ok=True)
    for split, own in (("train", rows[:count]), ("validation", rows[count:])):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))


if __name__ == "__main__":
    task_name, target, *more = sys.argv[1:]
    write_rows(task_name, Path(target).absolute(), int(more[0]) if more else _ROWS, more[1] if len(more) > 1 else None)
