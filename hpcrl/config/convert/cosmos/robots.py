"""Policies that move robots: simulators, chunks of actions, and what shows them to the policy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hpcrl.config.convert.conversion import Entry
from hpcrl.config.convert.cosmos.conditions import POLICY, is_grpo, is_robot
from hpcrl.config.convert.cosmos.resolve import Resolved

_ENGINE, _ROBOT = "generator.inference_engine", "environment.skyrl_gym.robot"
_CHUNK, _NUMBERS, _STEPS = 8, 7, 512
"""The source's constants for LIBERO: actions of a chunk, numbers of an action, and actions of an episode at most."""


def robots(source: Resolved, values: dict[str, Any]) -> Iterator[Entry]:
    if not is_grpo(source) or not is_robot(source):
        return
    _engine(values)
    values["environment.env_class"] = "robot"
    yield from _simulator(source, values)
    values["vla.num_envs"] = max(source["vla.num_envs"], source["rollout.n_generation"])
    if not source["vla.vla_type"].startswith("openvla"):
        return
    values[f"{_ROBOT}.show_state"], values[f"{_ROBOT}.actions_per_turn"] = False, _CHUNK
    values["generator.sampling_params.max_generate_length"] = _CHUNK * _NUMBERS
    if source["vla.vla_type"] == "openvla-oft":
        values["trainer.policy.model_config_kwargs"] = {"parallel_decoding": True}
        values["trainer.use_sample_packing"] = True
    values["generator.max_turns"] = -(-(source.values.get("vla.max_steps") or _STEPS) // _CHUNK)
    values["generator.step_wise_trajectories"] = True
    values["generator.chat_template.source"] = "name"
    values["generator.chat_template.name_or_path"] = "openvla"


def _engine(values: dict[str, Any]) -> None:
    """Have each GPU of the source's replicas serve the policy for itself: the engine of such models is on one."""
    values[f"{_ENGINE}.backend"] = "transformers"
    copies = values.pop(f"{_ENGINE}.data_parallel_size", 1)
    values[f"{_ENGINE}.num_engines"] = values.get(f"{_ENGINE}.num_engines", 1) * copies
    values.pop(f"{_ENGINE}.enforce_eager", None)


def _simulator(source: Resolved, values: dict[str, Any]) -> Iterator[Entry]:
    """Name the simulator, which the source takes by the name of its dataset, and the rows, which it makes of the simulator's tasks."""
    name = source[f"{POLICY}.dataset.name"]
    if not name:
        return
    suite = source[f"{POLICY}.dataset.subset"]
    if name != "libero" or not suite:
        values["data.train_data"] = values["data.val_data"] = None
        message = f'"{name}" is no simulator of hpcrl; name one in {_ROBOT}.simulator, and rows of its tasks here (docs/environments/robot.md)'
        yield Entry("conflict", f"{POLICY}.dataset.name", "data.train_data", message)
        return
    cameras = {} if source["vla.num_images_in_input"] < 2 else {"cameras": ["agentview", "wrist"]}
    values[f"{_ROBOT}.simulator"], values[f"{_ROBOT}.options"] = (
        "libero",
        {"suite": suite, "gripper": "openvla", **cameras},
    )
    values["data.train_data"], values["data.val_data"] = [f"./{suite}/train.jsonl"], [f"./{suite}/validation.jsonl"]
    message = f"rows of the suite's tasks, which `python -m hpcrl.envs.simulators.libero {suite} ./{suite}` writes"
    yield Entry("translated", f"{POLICY}.dataset.name", "data.train_data", message)
