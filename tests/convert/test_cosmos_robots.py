"""Cosmos-RL's settings of policies that move robots converted: simulators, chunks of actions, flows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpcrl.config import Config
from hpcrl.convert.conversion import Conversion
from tests.convert.cosmos_material import conflicts, converted, entries, of, one_replica


def test_robots() -> None:
    conversion = converted("10")
    values = conversion.values
    assert (values["vla.enable"], values["vla.num_envs"]) == (True, 8)
    assert values["trainer.placement.colocate_all"] is True
    assert values["trainer.fully_async.max_staleness_steps"] == 0
    assert values["trainer.algorithm.policy_loss_type"] == "regular"
    assert values["trainer.algorithm.dynamic_sampling.type"] == "filter"
    assert values["trainer.algorithm.dynamic_sampling.max_sample_batches"] == -1
    assert values["generator.sampling_params.top_k"] == -1
    assert "environment.reward_function" not in values
    (idle,) = entries(conversion, "train.train_policy.lower_bound_ratio")
    assert idle.kind == "dropped"
    assert not conflicts(conversion)
    robot = {name.rpartition(".")[2]: value for name, value in values.items() if ".robot." in name}
    assert (robot["simulator"], robot["options"]) == ("libero", {"suite": "libero_10", "gripper": "openvla"})
    assert values["generator.max_turns"] * robot["actions_per_turn"] == 512
    assert values["generator.sampling_params.max_generate_length"] == 7 * robot["actions_per_turn"]
    assert values["data.train_data"] == ["./libero_10/train.jsonl"]
    assert values["vla.norm_type"] == "bounds_q99"
    assert "trainer.policy.model_config_kwargs" not in values


def robot_of(simulator: str, vla: dict[str, Any], custom: dict[str, Any] | None = None) -> Conversion:
    """Convert a run of robots on one GPU."""
    trainer = "grpo_pi05" if vla.get("vla_type") == "pi05" else "grpo_vla"
    policy = {"type": "grpo", "trainer_type": trainer, "dataset": {"name": simulator, "subset": "beat_block_hammer"}}
    return of(
        {
            "train": {"train_policy": policy},
            "rollout": {"backend": "vla", "sampling_config": {"temperature": 0.6, "top_k": 50}, **one_replica()},
            "policy": one_replica(),
            "vla": vla,
            "custom": custom or {},
        }
    )


def test_robots_of_two_arms(tmp_path: Path) -> None:
    conversion = robot_of("robotwin", {"use_proprio": True, "proprio_dim": 14, "num_images_in_input": 3})
    values = conversion.values
    robot = {name.rpartition(".")[2]: value for name, value in values.items() if ".robot." in name}
    assert robot["simulator"] == "robotwin"
    assert robot["options"] == {"cameras": ["head", "left", "right"]}
    assert (robot["actions_per_turn"], values["generator.max_turns"]) == (25, 21)
    assert values["generator.sampling_params.max_generate_length"] == 25 * 14
    assert (values["vla.norm_type"], values["vla.use_proprio"]) == ("bounds", True)
    assert values["trainer.policy.model_config_kwargs"] == {"proprio_dim": 14}
    assert not conflicts(conversion)
    (tmp_path / "robots.toml").write_text(conversion.to_toml())
    told = Config.from_toml([tmp_path / "robots.toml"], ["trainer.eval_interval=0"]).trainer.policy.model_config_kwargs
    assert told == {"proprio_dim": 14, "parallel_decoding": True, "use_proprio": True}


def test_robots_moved_by_a_flow(tmp_path: Path) -> None:
    told = {"num_steps": 5, "action_chunk": 10, "noise_method": "flow_cps", "noise_level": 0.3, "max_token_len": 180}
    told |= {"discrete_state_input": True, "action_env_dim": 7, "noise_params": [0.7, 0.3, 400.0]}
    conversion = robot_of("libero", {"vla_type": "pi05", "num_images_in_input": 3}, {"pi05": told, "mine": 1})
    values = conversion.values
    own = {name.removeprefix("vla."): value for name, value in values.items() if name.startswith("vla.")}
    assert (own["pi05.num_steps"], own["pi05.noise_method"], own["pi05.noise_level"]) == (5, "flow_cps", 0.3)
    assert (own["use_proprio"], values["trainer.max_prompt_length"]) == (True, 180)
    assert values["environment.skyrl_gym.robot.actions_per_turn"] == 10
    assert values["environment.skyrl_gym.robot.options"]["cameras"] == ["agentview", "wrist"]
    assert values["generator.max_turns"] == 52
    assert values["trainer.policy.freeze_pattern"] == [r"^vlm\."]
    assert values["environment.custom"] == {"mine": 1}
    assert not conflicts(conversion)
    assert [entry.kind for entry in entries(conversion, "custom")] == ["translated", "mapped", "differs"]
    for name in ("train.train_policy.temperature", "rollout.sampling_config.top_k"):
        (idle,) = entries(conversion, name) or [None]
        assert idle is None or "chooses among tokens" in idle.message
    (tmp_path / "robots.toml").write_text(conversion.to_toml())
    assert Config.from_toml([tmp_path / "robots.toml"], ["trainer.eval_interval=0"]).vla.vla_type == "pi05"


def test_what_a_flow_has_there_and_not_here() -> None:
    told = {"noise_method": "flow_noise", "noise_anneal": True, "safe_get_logprob": True, "train_expert_only": False}
    conversion = robot_of("libero", {"vla_type": "pi05"}, {"pi05": told})
    missing = [entry.message for entry in entries(conversion, "custom") if entry.kind == "conflict"]
    assert [message.split(",")[0] for message in missing if "hpcrl has nothing like it" in message] == [
        'pi05 has noise_method = "flow_noise"', "pi05 has noise_anneal", "pi05 has safe_get_logprob",
    ]  # fmt: skip
    assert not conversion.values.get("trainer.policy.freeze_pattern")
    default = robot_of("libero", {"vla_type": "pi05"})
    assert default.values["environment.skyrl_gym.robot.actions_per_turn"] == 5
    assert (default.values["vla.use_proprio"], default.values["vla.pi05.num_steps"]) == (False, 10)


def test_robots_whose_simulator_is_not_known() -> None:
    policy = {"type": "grpo", "trainer_type": "grpo_vla", "dataset": {"name": "b1k", "subset": "x"}}
    conversion = of({"train": {"train_policy": policy}, "rollout": {"backend": "vla", "n_generation": 8}})
    libero = of(
        {
            "train": {"train_policy": {**policy, "dataset": {"name": "libero", "subset": "libero_goal"}}},
            "rollout": {"backend": "vla"},
            "vla": {"num_images_in_input": 2},
        }
    )
    options = libero.values["environment.skyrl_gym.robot.options"]
    assert options == {"suite": "libero_goal", "gripper": "openvla", "cameras": ["agentview", "wrist"]}
    assert "no simulator of hpcrl" in conflicts(conversion)["train.train_policy.dataset.name"]
    assert conversion.values["vla.num_envs"] == 8


def test_what_trainers_of_robots_do_not_read() -> None:
    policy = {"type": "grpo", "trainer_type": "grpo_vla", "mini_batch": 4, "mu_iterations": 3}
    conversion = of({"train": {"train_policy": policy}, "rollout": {"backend": "vla"}})
    for name in ("mini_batch", "mu_iterations"):
        assert [entry.kind for entry in entries(conversion, f"train.train_policy.{name}")] == ["dropped"]
    assert "trainer.update_epochs_per_batch" not in conversion.values
    assert conversion.values["trainer.micro_train_batch_size_per_gpu"] == 16, "vla.training_chunk_size"
