"""A planar arm that is to touch a target, in MuJoCo: an environment of gymnasium, "hpcrl.envs.simulators.arm:hpcrl/Arm-v0"."""

from __future__ import annotations

import math
import os
from importlib import import_module
from typing import Any

import gymnasium
import numpy as np

# without a display; Mesa's software renderer where there is no GPU
os.environ["MUJOCO_GL"] = os.environ.get("MUJOCO_GL") or "egl"

mujoco: Any = import_module("mujoco")
_LINK = 0.5  # m


def _model(joints: int) -> str:
    """Return MuJoCo's description of the arm: links of one length in a chain, each held at an angle by its motor."""
    links = "".join(
        f'<body pos="{_LINK if joint else 0} 0 0"><joint name="j{joint}" axis="0 0 1" damping="2"/>'
        f'<geom type="capsule" fromto="0 0 0 {_LINK} 0 0" size="0.04" mass="0.2" rgba="0.2 0.4 0.9 1" contype="0"/>'
        for joint in range(joints)
    )
    tip = f'<site name="tip" pos="{_LINK} 0 0" size="0.05" rgba="0.1 0.8 0.2 1"/>'
    motors = "".join(f'<position joint="j{joint}" kp="20"/>' for joint in range(joints))
    reach = joints * _LINK
    # shadows and smooth edges make a frame of Mesa's software renderer a hundred times as dear
    return f"""
    <mujoco>
      <option timestep="0.01" gravity="0 0 -9.81"/>
      <visual><quality shadowsize="0" offsamples="0"/></visual>
      <worldbody>
        <light pos="0 0 3" dir="0 0 -1" castshadow="false"/>
        <camera name="above" pos="0 0 {3 * reach}" fovy="45"/>
        <geom type="plane" size="{2 * reach} {2 * reach} 0.1" pos="0 0 -0.1" rgba="0.9 0.9 0.9 1" contype="0"/>
        <body name="target" mocap="true"><geom type="sphere" size="0.08" rgba="0.9 0.1 0.1 1" contype="0"/></body>
        {links}{tip}{"</body>" * joints}
      </worldbody>
      <actuator>{motors}</actuator>
    </mujoco>"""


class Arm(gymnasium.Env[np.ndarray, np.ndarray]):
    """Turn the joints until the tip is at the target; an action is by how much each turns, as a share of the largest turn.

    The state says of each joint by how much it is to turn so that the tip is at the target, from -1 to 1 for -pi to pi.

    Args:
        joints: 1 or more.
        turn: the largest turn of an action, in rad.
        tolerance: distance between tip and target at which the target is touched, in m.
        size: height and width of frames, in pixels.
        start: angle of each joint in the beginning, in rad; None: any.
    """

    metadata = {"render_modes": ["rgb_array"]}

    def __init__(
        self,
        joints: int = 2,
        turn: float = math.pi / 4,
        tolerance: float = 0.1,
        size: int = 64,
        start: float | None = None,
        render_mode: str | None = None,
    ) -> None:
        self.render_mode, self._joints, self._size, self._start = render_mode, joints, size, start
        self._turn, self._tolerance = turn, tolerance
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (joints,), np.float32)
        self.observation_space = gymnasium.spaces.Box(-1.0, 1.0, (joints,), np.float64)
        self._model = mujoco.MjModel.from_xml_string(_model(joints))
        self._data = mujoco.MjData(self._model)
        self._tip = self._model.site("tip").id
        self._goal = np.zeros(joints)
        self._renderer: Any = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        mujoco.mj_resetData(self._model, self._data)
        self._goal = self.np_random.uniform(-math.pi, math.pi, self._joints)
        self._data.mocap_pos[0] = self._tip_at(self._goal)
        any_pose = self.np_random.uniform(-math.pi, math.pi, self._joints)
        self._pose(any_pose if self._start is None else np.full(self._joints, self._start))
        return self._state(), {"is_success": self._touches()}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._data.ctrl[:] += self._turn * np.clip(action, -1.0, 1.0)
        for _ in range(40):  # 0.4 s, in which the motors get there
            mujoco.mj_step(self._model, self._data)
        touches = self._touches()
        return self._state(), float(touches), touches, False, {"is_success": touches}

    def render(self) -> Any:
        if self.render_mode is None:
            return None
        if self._renderer is None:
            self._renderer = mujoco.Renderer(self._model, self._size, self._size)
        self._renderer.update_scene(self._data, camera="above")
        return self._renderer.render()

    def close(self) -> None:
        if self._renderer is not None:
            self._renderer.close()

    def _pose(self, angles: np.ndarray) -> None:
        self._data.qpos[:], self._data.qvel[:], self._data.ctrl[:] = angles, 0.0, angles
        mujoco.mj_forward(self._model, self._data)

    def _tip_at(self, angles: np.ndarray) -> np.ndarray:
        self._pose(angles)
        return self._data.site_xpos[self._tip].copy()

    def _touches(self) -> bool:
        distance = np.linalg.norm(self._data.site_xpos[self._tip] - self._data.mocap_pos[0])
        return bool(distance <= self._tolerance)

    def _state(self) -> np.ndarray:
        return ((self._goal - self._data.qpos) / math.pi + 1.0) % 2.0 - 1.0


gymnasium.register("hpcrl/Arm-v0", entry_point=f"{__name__}:Arm")
