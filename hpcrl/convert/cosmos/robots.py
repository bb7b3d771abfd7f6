"""Policies that move robots: simulators, chunks of actions, and what shows them to the policy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hpcrl.convert.conversion import Entry
from hpcrl.convert.cosmos.conditions import POLICY, is_grpo, is_robot, moves_by_flow
from hpcrl.convert.cosmos.resolve import Resolved

_ENGINE, _ROBOT = "generator.inference_engine", "environment.skyrl_gym.robot"
_VLM = r"^vlm\."
"""All that PI0.5 has but the expert."""
_PI05: dict[str, Any] = {
    "num_steps": 10,
    "action_chunk": 5,
    "noise_method": "flow_sde",
    "noise_level": 0.5,
    "noise_anneal": False,
    "safe_get_logprob": False,
    "train_expert_only": True,
    "discrete_state_input": False,
    "max_token_len": 200,
}
"""Defaults of the table custom.pi05."""
_STEPS = 512
"""Actions of an episode at most, where the source does not name them."""


@dataclass(frozen=True)
class _Tokens:
    """The source's constants for the actions of a simulator that are tokens.

    Attributes:
        chunk: actions of a turn.
        numbers: of an action.
        norm_type: vla.norm_type.
    """

    chunk: int
    numbers: int
    norm_type: str


_OF_SIMULATORS = {"libero": _Tokens(8, 7, "bounds_q99"), "robotwin": _Tokens(25, 14, "bounds")}


def robots(source: Resolved, values: dict[str, Any]) -> Iterator[Entry]:
    if not is_grpo(source) or not is_robot(source):
        return
    _engine(values)
    values["environment.env_class"] = "robot"
    yield from _simulator(source, values)
    values["vla.num_envs"] = max(source["vla.num_envs"], source["rollout.n_generation"])
    values[f"{_ROBOT}.show_state"] = False
    values["generator.step_wise_trajectories"] = True
    if moves_by_flow(source):
        yield from _flow(source, values)
    elif source["vla.vla_type"].startswith("openvla"):
        _tokens(source, values)


def _tokens(source: Resolved, values: dict[str, Any]) -> None:
    """Set how OpenVLA acts."""
    known = _OF_SIMULATORS.get(source[f"{POLICY}.dataset.name"], _OF_SIMULATORS["libero"])
    values[f"{_ROBOT}.actions_per_turn"], values["vla.norm_type"] = known.chunk, known.norm_type
    values["generator.sampling_params.max_generate_length"] = known.chunk * known.numbers
    values["generator.max_turns"] = _turns(source, known.chunk)
    if source["vla.vla_type"] == "openvla-oft":
        values["trainer.use_sample_packing"] = True
        if source["vla.use_proprio"]:
            values["trainer.policy.model_config_kwargs"] = {"proprio_dim": source["vla.proprio_dim"]}
    values["generator.chat_template.source"] = "name"
    values["generator.chat_template.name_or_path"] = "openvla"


def _turns(source: Resolved, chunk: int) -> int:
    return -(-(source.values.get("vla.max_steps") or _STEPS) // chunk)


def _flow(source: Resolved, values: dict[str, Any]) -> Iterator[Entry]:
    """Set how PI0.5 acts, by the table custom.pi05; what it lacks is as the source has it."""
    told = {**_PI05, **own} if isinstance(own := source["custom"].get("pi05", {}), dict) else _PI05
    for name in [
        name for name in values if name.startswith(("generator.sampling_params.", "generator.eval_sampling_params."))
    ]:
        del values[name]
    for name in ("vla.unnorm_key", "trainer.policy.compile_model"):  # of policies of tokens
        values.pop(name, None)
    chunk = told["action_chunk"]
    values[f"{_ROBOT}.actions_per_turn"] = chunk
    values["generator.max_turns"] = _turns(source, chunk if isinstance(chunk, int) and chunk > 0 else 1)
    values["vla.use_proprio"], values["trainer.max_prompt_length"] = told["discrete_state_input"], told["max_token_len"]
    for name in ("num_steps", "noise_method", "noise_level"):
        values[f"vla.pi05.{name}"] = told[name]
    if told["train_expert_only"]:
        values["trainer.policy.freeze_pattern"] = [*(values.get("trainer.policy.freeze_pattern") or []), _VLM]
    missing = {
        'noise_method = "flow_noise", noise that a network learns': told["noise_method"] == "flow_noise",
        "noise_anneal, noise that becomes less": told["noise_anneal"],
        "safe_get_logprob, squared differences in the place of log-probabilities": told["safe_get_logprob"],
    }
    for what in (what for what, wanted in missing.items() if wanted):
        yield Entry("conflict", "custom", "vla.pi05", f"pi05 has {what}: hpcrl has nothing like it")
    message = (
        f"the table pi05; action_chunk is {_ROBOT}.actions_per_turn, discrete_state_input vla.use_proprio, max_token_len "
        "trainer.max_prompt_length (here without the state), train_expert_only trainer.policy.freeze_pattern; numbers of an action are the simulator's"
    )
    yield Entry("translated", "custom", "vla.pi05", message)


def _engine(values: dict[str, Any]) -> None:
    """Have each GPU of the source's replicas serve the policy for itself: the engine of such models is on one."""
    values[f"{_ENGINE}.backend"] = "transformers"
    copies = values.pop(f"{_ENGINE}.data_parallel_size", 1)
    values[f"{_ENGINE}.num_engines"] = values.get(f"{_ENGINE}.num_engines", 1) * copies
    for name in ("enforce_eager", "enable_chunked_prefill"):  # vLLM's
        values.pop(f"{_ENGINE}.{name}", None)


def _simulator(source: Resolved, values: dict[str, Any]) -> Iterator[Entry]:
    """Name the simulator, which the source takes by the name of its dataset, and the rows, which it makes of the simulator's tasks."""
    name = source[f"{POLICY}.dataset.name"]
    if not name:
        return
    suite = source[f"{POLICY}.dataset.subset"]
    for selector in ("subset", "revision", "val_subset", "val_revision"):  # of the simulator's tasks, not of files
        values.pop(f"data.{selector}", None)
    if name not in _OF_SIMULATORS or not suite:
        values["data.train_data"] = values["data.val_data"] = None
        message = f'"{name}" is no simulator of hpcrl; name one in {_ROBOT}.simulator, and rows of its tasks here (docs/environments/robot.md)'
        yield Entry("conflict", f"{POLICY}.dataset.name", "data.train_data", message)
        return
    wrists = source["vla.num_images_in_input"] > 1
    if name == "libero":
        options = {"suite": suite, **({"cameras": ["agentview", "wrist"]} if wrists else {})}
        options |= {} if moves_by_flow(source) else {"gripper": "openvla"}
    else:
        options = {"cameras": ["head", "left", "right"]} if wrists else {}
    values[f"{_ROBOT}.simulator"], values[f"{_ROBOT}.options"] = name, options
    values["data.train_data"], values["data.val_data"] = [f"./{suite}/train.jsonl"], [f"./{suite}/validation.jsonl"]
    message = f"rows of the simulator's tasks, which `python -m hpcrl.envs.simulators.{name} {suite} ./{suite}` writes"
    yield Entry("translated", f"{POLICY}.dataset.name", "data.train_data", message)
