"""Conversion of Cosmos-RL's TOML files: what the result is, and what the report says."""

import csv
import math
from pathlib import Path
from typing import Any

import pytest
import tomli

from hpcrl.config import Config
from hpcrl.config.fields import settings
from hpcrl.convert.cosmos.convert import TARGETS, convert_toml
from hpcrl.convert.cosmos.resolve import fields
from hpcrl.convert.mapping import Dropped, To, Translated
from hpcrl.errors import ConfigError
from tests.convert.cosmos_material import (
    CONVERTED,
    REFUSED,
    SPEC,
    conflicts,
    converted,
    entries,
    of,
    one_replica,
)


def test_each_field_has_a_place_or_a_reason() -> None:
    with (SPEC / "fields.tsv").open() as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    sections = {row["path"].rpartition(".")[0] for row in rows}
    assert len(rows) > 330
    for row in rows:
        assert row["path"] in TARGETS or row["path"] in sections, row["path"]
    tables = {field.path for field in fields() if field.is_table}
    assert {field.path for field in fields()} - tables == set(TARGETS)


def test_each_place_exists() -> None:
    known = {setting.path for setting in settings(Config)}
    for field, target in TARGETS.items():
        if isinstance(target, Dropped):
            assert len(target.reason) > 10, field
            continue
        for path in (target.path,) if isinstance(target, To) else target.paths:
            assert path in known, f"{field} -> {path}"
        assert not isinstance(target, Translated) or target.how


def test_each_field_that_is_translated_changes_what_it_says_it_does() -> None:
    promised = {path for target in TARGETS.values() if isinstance(target, Translated) for path in target.paths}
    written: set[str] = set()
    for tree in _VARIETY:
        written |= of(
            {key: dict(value) if isinstance(value, dict) else value for key, value in tree.items()}
        ).values.keys()
    assert promised - written == set()


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_training_configuration_is_refused(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        converted(name)
    assert REFUSED[name] in str(caught.value)
    assert str(caught.value).startswith((f"{name}.toml: ", f"{name}.toml:20: "))


NOT_AS_RL = {
    "01_grpo_qwen2.5-3b": [],
    "03_sft_pp2_cp2_qwen2.5-7b": ["unconverted.policy.parallelism.dp_shard_size"],
    "04_distill_deepmath_qwen3-8b": [],
    "05_grpo_multiturn_qwen2.5-3b": ["unconverted.rollout.multi_turn_config.enable"],
    "10_vla_openvla-oft_libero": [],
    "12_sft_moe_deepseek-v3_pp4_ep64": [],
    "gym_cartpole": ["unconverted.train.train_policy.trainer_type", "unconverted.rollout.backend", "data.train_data"],
    "trtllm_backend": ["unconverted.rollout.backend"],
    "typo_key_sft": ["unconverted.policy.parallelism.dp_shard_size"],
}


@pytest.mark.parametrize("path", CONVERTED, ids=lambda path: path.stem)
def test_no_file_is_read_as_something_else_than_it_was(path: Path, tmp_path: Path) -> None:
    text = convert_toml(path.read_text(), path.name).to_toml()
    assert text.startswith(f"# converted by `hpcrl config convert` from {path.name}\n")
    target = tmp_path / "converted.toml"
    target.write_text(text)
    if not NOT_AS_RL[path.stem]:
        Config.from_toml([target])
        return
    with pytest.raises(ConfigError) as caught:
        Config.from_toml([target])
    for setting in NOT_AS_RL[path.stem]:
        assert f"{setting}: " in str(caught.value)


@pytest.mark.parametrize("path", CONVERTED, ids=lambda path: path.stem)
def test_the_report_speaks_of_every_key_once(path: Path) -> None:
    conversion = convert_toml(path.read_text(), path.name)
    told = [
        entry.source for entry in conversion.entries if entry.kind in ("mapped", "translated", "dropped", "unknown")
    ]
    assert len(told) == len(set(told))
    keys = set(_keys(tomli.loads(path.read_text()), ""))
    assert {source for source in told if not any(key.startswith(source + ".") for key in keys)} <= keys
    assert keys <= {key for key in keys for source in told if key == source or key.startswith(source + ".")}


def _keys(table: dict[str, Any], prefix: str) -> list[str]:
    found = []
    for key, value in table.items():
        inside = isinstance(value, dict) and not isinstance(TARGETS.get(prefix + key), To)
        found += _keys(value, f"{prefix}{key}.") if inside else [prefix + key]
    return found


def test_plain_grpo(tmp_path: Path) -> None:
    conversion = converted("01")
    (tmp_path / "grpo.toml").write_text(conversion.to_toml())
    config = Config.from_toml([tmp_path / "grpo.toml"])
    assert config.data.train_data == ["JiaxinTsao/math_examples:train"]
    assert (config.trainer.train_batch_size, config.generator.n_samples_per_prompt) == (12, 16)  # 192 samples
    assert (config.trainer.policy_mini_batch_size, config.trainer.micro_train_batch_size_per_gpu) == (12, 2)
    assert (config.trainer.max_prompt_length, config.generator.sampling_params.max_generate_length) == (2048, 2048)
    assert not config.trainer.algorithm.use_kl_loss
    assert config.trainer.fully_async.max_staleness_steps == 4
    assert config.trainer.eval_interval == -1
    assert config.trainer.policy.optimizer_config.num_warmup_steps == 20
    assert (config.trainer.algorithm.temperature, config.generator.sampling_params.temperature) == (None, 1.0)
    (translated,) = entries(conversion, "train.train_policy.temperature")
    assert "0.9" in translated.message
    assert not conflicts(conversion)
    assert conversion.values["trainer.algorithm.policy_loss_type"] == "dual_clip"
    assert conversion.values["trainer.algorithm.loss_reduction"] == "token_mean_legacy"
    assert conversion.values["environment.reward_function"] == {"boxed_math": 1.0}
    (dropped,) = entries(conversion, "redis")
    assert dropped.kind == "dropped"
    assert conversion.values["trainer.logger"] == ["console", "wandb"]
    assert not conversion.incomplete


def test_distillation() -> None:
    conversion = converted("04")
    values = conversion.values
    assert values["trainer.distillation.enable"] is True
    assert values["trainer.distillation.model_path"] == "Qwen/Qwen3-8B"
    assert values["trainer.distillation.placement.fsdp_size"] == 2
    assert values["trainer.algorithm.loss_reduction"] == "token_sum"
    assert values["trainer.algorithm.clip_ratio_c"] == 100.0
    assert values["trainer.algorithm.eps_clip_low"] == 1.0
    assert values["trainer.algorithm.eps_clip_high"] > math.exp(20)
    assert "environment.reward_function" not in values
    assert values["data.val_data"] == ["math-ai/aime24:test"]
    assert (values["trainer.eval_interval"], values["trainer.eval_before_train"]) == (30, True)
    assert values["generator.eval_sampling_params.temperature"] == 0.6
    assert values["generator.eval_sampling_params.max_generate_length"] == 32768
    assert values["trainer.policy.optimizer_config.name"] == "Adam"
    assert values["trainer.policy.optimizer_config.max_grad_norm"] == 0.0
    assert not conflicts(conversion)


def test_several_turns() -> None:
    conversion = converted("05")
    values = conversion.values
    assert values["generator.max_turns"] == 5
    assert "environment.reward_function" not in values
    assert "here by an environment" in conflicts(conversion)["rollout.multi_turn_config.enable"]
    assert values["generator.chat_template_kwargs"] == {"enable_thinking": True}
    assert values["generator.chat_template.source"] == "file"
    assert values["generator.chat_template.name_or_path"].endswith("gsm8k_tool_chat_template.jinja2")
    assert values["generator.inference_engine.num_engines"] == 4
    assert values["trainer.max_prompt_length"] == 1024


def test_fine_tuning_of_experts_in_a_pipeline() -> None:
    conversion = converted("12")
    values, megatron = conversion.values, "trainer.policy.megatron_config"
    assert (values["trainer.mode"], values["trainer.strategy"]) == ("sft", "megatron")
    assert values[f"{megatron}.pipeline_model_parallel_size"] == 4
    assert values[f"{megatron}.expert_model_parallel_size"] == 64
    assert values[f"{megatron}.pipeline_schedule"] == "1F1B"  # for GPipe, which Megatron-core does not have
    assert f"{megatron}.pipeline_layers_per_stage" not in values  # counts for the interleaved schedule only
    placement = values["trainer.placement.policy_num_nodes"], values["trainer.placement.policy_num_gpus_per_node"]
    assert placement == (32, 8)  # 64 shards x 4 stages
    assert (values["trainer.train_batch_size"], values["trainer.micro_train_batch_size_per_gpu"]) == (512, 2)
    assert (values["trainer.max_length"], values["data.conversation_column"]) == (512, "conversation")
    assert values["trainer.profiler.ranks"] == [1]
    assert values["trainer.run_name"] == "deepseek-v3-sft"
    assert not [path for path in values if path.startswith(("generator.", "trainer.algorithm."))]
    (unknown,) = [entry for entry in conversion.entries if entry.kind == "unknown"]
    assert unknown.source == "policy.parallelism.cp_rotate_method"


def test_one_profiler_at_a_time() -> None:
    both = of({"profiler": {"enable_profiler": True, "enable_nsys": True}})
    assert (both.values["trainer.profiler.enable_nsys"], both.values["trainer.profiler.enable"]) == (True, False)
    assert [entry.kind for entry in both.entries if entry.source == "profiler.enable_profiler"] == ["dropped"]
    alone = of({"profiler": {"enable_profiler": True}})
    assert alone.values["trainer.profiler.enable"] is True


def test_other_engines_and_trainers_are_conflicts() -> None:
    found = conflicts(converted("trtllm_backend"))
    assert 'vllm is the only engine, found "trtllm"' in found["rollout.backend"]
    assert "leaves no token" in found["policy.model_max_length"]
    gym = converted("gym_cartpole")
    assert {"rollout.backend", "train.train_policy.trainer_type"} <= conflicts(gym).keys()
    assert {entry.source for entry in gym.entries if entry.kind == "unknown"} == {"model", "env"}


def test_a_misspelt_key() -> None:
    conversion = converted("typo_key_sft")
    (unknown,) = entries(conversion, "policy.model_gradient_checkpointig")
    assert (unknown.kind, "policy.model_gradient_checkpointing?" in unknown.message) == ("unknown", True)


def test_names_of_the_run() -> None:
    train = {"output_dir": "./outputs/some run", "timestamp": "20260101"}
    values = of({"train": dict(train), "logging": {"project_name": "my/project", "experiment_name": "None"}}).values
    assert (values["trainer.project_name"], values["trainer.run_name"]) == ("my-project", "some-run-20260101")
    values = of({"train": dict(train), "logging": {"experiment_name": "first"}}).values
    assert values["trainer.run_name"] == "first-20260101"
    assert of({}).values["trainer.run_name"] is None
    values = of({"train": {"output_dir": "/scratch/me/some"}}).values
    assert (values["trainer.run_name"], values["slurm.checkpoint_root"]) == ("some", "/scratch/me/some")
    assert "slurm.export_root" not in of({"train": {"output_dir": "./outputs/some"}}).values, "below slurm.root"


def test_evaluation_on_a_share_of_the_training_data() -> None:
    conversion = of({"validation": {"enable": True, "freq": 3, "n_generation": 4, "reward_function": "gsm8k"}})
    values = conversion.values
    assert (values["data.test_size"], values["trainer.eval_interval"]) == (0.1, 3)
    assert values["generator.eval_n_samples_per_prompt"] == 4
    assert values["environment.eval_reward_function"] == {"gsm8k": 1.0}
    assert (values["generator.eval_sampling_params.temperature"], values["generator.eval_sampling_params.top_k"]) == (
        0.0,
        1,
    )


def test_named_rewards_in_each_of_their_forms() -> None:
    for given in ("gsm8k", ["gsm8k"], {"gsm8k": 1}):
        conversion = of({"train": {"train_policy": {"type": "grpo", "reward_function": given}}})
        assert 'reward_function = {"gsm8k" = 1.0}' in conversion.to_toml().replace("gsm8k =", '"gsm8k" =')
        assert not conflicts(conversion)
    weights = {"gsm8k": 0.9, "overlong": 0.1}
    overlong = {"buffer_length": 512, "penalty_factor": 2, "enable_overlong_penalty": False}
    policy = {"type": "grpo", "reward_function": weights, "overlong_reward": overlong}
    conversion = of({"train": {"train_policy": policy}})
    assert conversion.values["environment.reward_function"] == weights
    assert conversion.values["environment.overlong_reward.buffer_length"] == 512
    assert conversion.values["environment.overlong_reward.penalty_factor"] == 2
    assert not conflicts(conversion)
    conversion = of({"train": {"train_policy": {**policy, "reward_function": "gsm8k"}}})
    assert "environment.overlong_reward.buffer_length" not in conversion.values, "it has no effect there either"


def test_a_reward_that_only_filters_is_reported_and_does_not_pay() -> None:
    policy = {"type": "grpo", "reward_function": {"gsm8k": 2.0}, "filter_reward_metric": ["format", "gsm8k"]}
    policy["variant"] = "dapo"
    conversion = of({"train": {"train_policy": policy}})
    assert conversion.values["environment.reward_function"] == {"gsm8k": 2.0, "format": 0.0}
    assert conversion.values["trainer.algorithm.filter_reward_metric"] == ["format", "gsm8k"]
    (entry,) = entries(conversion, "train.train_policy.filter_reward_metric")
    assert (entry.kind, entry.target) == ("translated", "environment.reward_function")
    assert not conflicts(conversion)


def test_rewards_of_a_service() -> None:
    rewards = [{"name": "hpsv2", "weight": 1, "clip_max": 2}]
    policy = {"type": "grpo", "use_remote_reward": True, "remote_reward": {"reward_fns": rewards, "scale": 2.0}}
    conversion = of({"train": {"train_policy": policy}})
    remote = {path.rpartition(".")[2]: value for path, value in conversion.values.items() if ".remote_reward." in path}
    assert remote == {
        "enable": True,
        "reward_function": {"hpsv2": 1.0},
        "score_key": "hpsv2",
        "clip_min": -5.0,
        "clip_max": 2.0,
        "scale": 2.0,
        "batch_size": 1,
    }
    assert not conflicts(conversion)
    rewards.append({"name": "ocr"})
    assert "train.train_policy.remote_reward.reward_fns" in conflicts(of({"train": {"train_policy": policy}}))


def test_a_diffusion_model_of_the_older_version() -> None:
    policy = {
        "type": "grpo",
        "trainer_type": "diffusion_nft",
        "kl_beta": 0.5,
        "use_remote_reward": True,
        "remote_reward": {"reward_fn": {"pickscore": 1.0}, "score_key": "pick"},
    }
    tree = {
        "mode": "colocated",
        "train": {"compile": False, "ema_enable": True, "train_policy": policy},
        "rollout": {"backend": "diffusion_nft_rollout", "parallelism": {"tp_size": 1, "dp_shard_size": 8}},
        "policy": {
            **one_replica(dp_shard_size=8),
            "is_diffusers": True,
            "lora": {"r": 32, "lora_names": ["default", "ref"], "target_modules": ["to_q"]},
            "diffusers": {"timestep_fraction": 0.99, "train_flow_shift": 5.0},
        },
    }
    conversion = of(tree)
    values, diffusers = conversion.values, "trainer.policy.diffusers"
    assert (values[f"{diffusers}.enable"], values[f"{diffusers}.nft_beta"]) == (True, 0.5)
    assert (values[f"{diffusers}.ema.enable"], values[f"{diffusers}.ema.update_step_interval"]) == (True, 1)
    assert values["generator.inference_engine.backend"] == "diffusers"
    (names,) = entries(conversion, "policy.lora.lora_names")
    assert names.kind == "dropped"
    assert values["environment.remote_reward.reward_function"] == {"pickscore": 1.0}
    assert values["environment.remote_reward.score_key"] == "pick"
    assert "trainer.algorithm.policy_loss_type" not in values
    (unknown,) = entries(conversion, "policy.diffusers.timestep_fraction")
    assert "policy.diffusers.timesteps_fraction" in unknown.message
    (dead,) = entries(conversion, "policy.diffusers.train_flow_shift")
    assert dead.kind == "dropped"


def test_errors_name_file_and_line() -> None:
    with pytest.raises(ConfigError) as caught:
        convert_toml('[train]\nmax_num_steps = 0\n[train.ckpt]\nsave_mode = "x"\n', "grpo.toml")
    assert [line.partition(" ")[0] for line in str(caught.value).splitlines()] == ["grpo.toml:4:", "grpo.toml:2:"]


def test_an_empty_file_is_all_defaults() -> None:
    conversion = convert_toml("", "empty.toml")
    assert conversion.values["trainer.policy.model.path"] == "Qwen/Qwen2.5-VL-7B-Instruct"
    assert "train.train_policy.dataset.name" in conflicts(conversion)


_VARIETY: list[dict[str, Any]] = [
    {
        "train": {
            "train_policy": {
                "type": "grpo",
                "trainer_type": "grpo_vla",
                "dataset": {"name": "libero", "subset": "libero_10"},
            }
        },
        "rollout": {"backend": "vla"},
    },
    {
        "train": {"train_policy": {"type": "grpo", "trainer_type": "grpo_pi05"}},
        "rollout": {"backend": "vla"},
        "vla": {"vla_type": "pi05"},
    },
    {"train": {"output_dir": "/scratch/me/outputs"}},
    {"validation": {"enable": True}},
    {"validation": {"enable": True, "dataset": {"name": "d", "split": "test"}}},
    {
        "train": {
            "train_policy": {
                "type": "grpo",
                "variant": "dapo",
                "kl_beta": 0.1,
                "entropy_coeff": 0.1,
                "use_decoupled_loss": True,
            }
        }
    },
    {
        "train": {"train_policy": {"type": "grpo", "aipo_rho": 2.0}, "optm_warmup_steps": 0.5},
        "policy": one_replica(cp_size=2),
    },
    {"train": {"ckpt": {"enable_checkpoint": True, "save_freq_in_epoch": 1}}, "policy": {"aux_loss_coeff": 0.1}},
    {"train": {"train_policy": {"type": "grpo", "use_remote_reward": True}}, "policy": {"trainable_pattern": ["a"]}},
    {
        "rollout": {"multi_turn_config": {"enable": True, "custom_chat_template_path": "t.jinja"}},
        "distillation": {"enable": True},
        "logging": {"project_name": "p"},
    },
    {"distillation": {"enable": True, **one_replica()}},
    {
        "train": {
            "max_num_steps": 5,
            "train_policy": {"type": "sft", "enable_dp_load_balancing": True, "load_balanced_max_tokens_for_batch": 10},
        }
    },
    {
        "train": {"train_policy": {"type": "sft", "trainer_type": "dpo"}},
        "custom": {"dpo_beta": 0.2, "dpo_loss_type": ["sigmoid", "sft"], "dpo_loss_weights": [1.0, 0.5]},
    },
]


def test_datasets_of_a_hub_keep_their_names() -> None:
    conversion = of({})
    assert conversion.values["data.train_data"] == ["org/data"]
    assert not [entry for entry in conversion.entries if entry.source == "data.train_data"]


def test_a_misspelt_table() -> None:
    conversion = of({"rollout": {"samling_config": {"temperature": 2.0}}})
    (entry,) = entries(conversion, "rollout.samling_config")
    assert "did you mean rollout.sampling_config?" in entry.message


def test_what_is_not_implemented_yet_counts_when_the_result_is_checked() -> None:
    policy = {"model_name_or_path": "m", **one_replica(tp_size=8)}  # eight ranks share each sample
    fits = of({"train": {"train_batch_per_replica": 4}, "policy": policy, "rollout": {"n_generation": 4}})
    assert conflicts(fits) == {}


def test_a_table_of_ones_own_says_who_reads_it() -> None:
    conversion = of({"custom": {"bonus": 0.5}})
    assert conversion.values["environment.custom"] == {"bonus": 0.5}
    header = " ".join(conversion.to_toml().split())
    assert "mapped custom -> environment.custom: environments and rewards get it" in header
    assert not entries(of({}), "custom")


def test_preferences_are_learned_without_a_reference() -> None:
    kind = {"type": "sft", "trainer_type": "dpo", "conversation_column_name": "talk"}
    train = {"train_policy": {**kind, "dataset": {"name": "org/data"}}}
    policy = {"model_name_or_path": "m", "model_max_length": 512}
    plain = of({"train": train, "policy": policy}).values
    assert (plain["trainer.mode"], plain["trainer.dpo.reference_free"]) == ("dpo", True)
    assert "data.conversation_column" not in plain
    custom = {"dpo_beta": 0.2, "dpo_loss_type": ["sigmoid", "bco_pair", "sft"], "dpo_loss_weights": [0.8, 0.2, 1.0]}
    conversion = of({"train": train, "policy": policy, "custom": custom})
    assert not conflicts(conversion)
    found = {path: value for path, value in conversion.values.items() if path.startswith("trainer.dpo.")}
    assert found == {
        "trainer.dpo.reference_free": True,
        "trainer.dpo.beta": 0.2,
        "trainer.dpo.loss_type": custom["dpo_loss_type"],
        "trainer.dpo.loss_weights": custom["dpo_loss_weights"],
    }
    assert not conversion.values.get("environment.custom")
    (entry,) = entries(conversion, "custom")
    assert (entry.kind, entry.target) == ("translated", "trainer.dpo")
    few = of({"train": train, "policy": policy, "custom": custom | {"dpo_loss_weights": [0.5]}})
    assert few.values["trainer.dpo.loss_weights"] == [], "the source takes 1 each then"
    wrong = of({"train": train, "policy": policy, "custom": {"dpo_loss_type": ["nca"]}})
    assert 'found "nca"' in conflicts(wrong)["trainer.dpo.loss_type"]
    assert of({"custom": custom}).values["environment.custom"] == custom, "another trainer does not read it"


@pytest.mark.parametrize("value", [True, False])
def test_rewards_of_whole_groups_and_weights_from_elsewhere_are_not_lost(value: bool) -> None:
    given = {"group_reward_calculation": value, "dataset": {"name": "org/data"}}
    tree: dict[str, Any] = {"train": {"train_policy": {"type": "grpo", **given}}}
    conversion = of(tree | ({"policy": {"model_safetensor_path": "elsewhere"}} if value else {}))
    lost = {"train.train_policy.group_reward_calculation", "policy.model_safetensor_path"} if value else set()
    assert (
        conversion.unconverted.keys() & {"train.train_policy.group_reward_calculation", "policy.model_safetensor_path"}
        == lost
    )
    if value:
        assert "of_group(your_function)" in conflicts(conversion)["train.train_policy.group_reward_calculation"]
