"""verl's scripts, command lines and YAML converted: what main_ppo did there, it does here, and what has no counterpart is reported."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from hpcrl.cli.main import main
from hpcrl.config import Config
from hpcrl.config.fields import settings
from hpcrl.convert.conversion import Conversion
from hpcrl.convert.mapping import Dropped, To, Translated
from hpcrl.convert.verl.convert import RULES, convert_script, convert_words, convert_yaml
from hpcrl.convert.verl.fields import DEFAULTS, MEGATRON_DEFAULTS, TARGETS
from hpcrl.errors import ConfigError
from tests.convert.skyrl_material import kinds, load

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
ALGORITHM, ENGINE = "trainer.algorithm.", "generator.inference_engine."
SETTINGS = {setting.path: setting for setting in settings(Config)}

BASE = f"""
data.train_files=~/gsm8k/train.parquet data.val_files=~/gsm8k/test.parquet {MODEL}path=Qwen/Qwen3-4B
{ROLLOUT}name=vllm {ROLLOUT}n=8 {ACTOR}ppo_micro_batch_size_per_gpu=4 data.filter_overlong_prompts=True trainer.test_freq=10
"""
GRPO = f"{BASE} algorithm.adv_estimator=grpo {ACTOR}use_kl_loss=True {ACTOR}kl_loss_coef=0.01 {ACTOR}kl_loss_type=low_var_kl"
PPO = f"""
{BASE} {ROLLOUT}n=1 critic.model.path=Qwen/Qwen3-1.7B critic.optim.lr=2e-5 critic.cliprange_value=0.3 algorithm.gamma=0.99
algorithm.lam=0.95 algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.002
"""
DAPO = f"""
{BASE} data.train_files=~/dapo-math.parquet data.train_batch_size=64 algorithm.adv_estimator=grpo {ACTOR}ppo_mini_batch_size=16
{ACTOR}clip_ratio_low=0.2 {ACTOR}clip_ratio_high=0.28 {ACTOR}loss_agg_mode=token-mean {ACTOR}optim.lr_warmup_steps=10
algorithm.filter_groups.enable=True algorithm.filter_groups.max_num_gen_batches=10 algorithm.filter_groups.metric=seq_reward
reward_model.reward_manager=dapo +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True
+reward_model.reward_kwargs.overlong_buffer_cfg.len=512 +reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5
{ROLLOUT}val_kwargs.do_sample=True {ROLLOUT}val_kwargs.temperature=0.6 {ROLLOUT}val_kwargs.top_p=0.7 {ROLLOUT}val_kwargs.n=4
"""
LORA = f"{GRPO} {MODEL}lora_rank=32 {MODEL}lora_alpha=64 {MODEL}target_modules=[q_proj,v_proj]"
MEGATRON = f"""
{GRPO} model_engine=megatron trainer.nnodes=2 {ACTOR}megatron.tensor_model_parallel_size=2
{ACTOR}megatron.pipeline_model_parallel_size=2 {MODEL}lora.rank=16 +{ACTOR}megatron.override_transformer_config.recompute_granularity=full
+{ACTOR}megatron.override_transformer_config.recompute_method=uniform +{ACTOR}megatron.override_transformer_config.recompute_num_layers=1
"""
RECIPES = {"grpo": GRPO, "ppo": PPO, "dapo": DAPO, "lora": LORA, "megatron": MEGATRON}


def words(text: str, *more: str) -> Conversion:
    return convert_words(["python3", "-m", "verl.trainer.main_ppo", *shlex.split(text), *more], "command")


def complaints(conversion: Conversion) -> dict[str, str]:
    return {one.source: one.message for one in conversion.entries if one.kind in ("conflict", "unknown")}


# The table of fields


def test_every_field_has_a_place_or_a_reason() -> None:
    dropped = {path: target.reason for path, target in TARGETS.items() if isinstance(target, Dropped)}
    assert {path: reason for path, reason in dropped.items() if len(reason) <= 12} == {}
    kept = {path: target for path, target in TARGETS.items() if not isinstance(target, Dropped)}
    places = {path: (target.path,) if isinstance(target, To) else target.paths for path, target in kept.items()}
    assert {path: missing for path, found in places.items() if (missing := set(found) - set(SETTINGS))} == {}
    assert [path for path, target in kept.items() if not isinstance(target, To) and path not in RULES] == []


def test_rules_are_those_of_translated_fields() -> None:
    assert {path for path, target in TARGETS.items() if isinstance(target, Translated)} == set(RULES)


# Recipes


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_load_and_are_complete(recipe: str, tmp_path: Path) -> None:
    conversion = words(RECIPES[recipe])
    assert not complaints(conversion)
    config = load(conversion, tmp_path)
    assert config.trainer.epochs == 30
    assert config.generator.sampling_params.max_generate_length == 512


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_default_that_is_another_here_is_written_and_reported(recipe: str) -> None:
    conversion = words(RECIPES[recipe])
    written = conversion.to_toml()
    reported = {one.source for one in conversion.entries}
    for path, target in TARGETS.items():
        default = (DEFAULTS | (MEGATRON_DEFAULTS if recipe == "megatron" else {}))[path]
        if path in RULES or not isinstance(target, To) or target.path not in conversion.values or path in reported:
            continue
        value = target.values.get(default, default) if isinstance(default, str | int | float | None) else default
        setting = SETTINGS[target.path]
        assert value is None or setting.is_default(value), (
            f"{path}: {setting.path} has another default, and nothing is said"
        )
    for path in ("epochs = 30", 'ckpt_mode = "sync"', "max_ckpts_to_keep = -1", 'policy_loss_type = "dual_clip"'):
        assert path in written


def test_every_field_that_is_given_is_reported() -> None:
    given = {path: default for path, default in DEFAULTS.items() if default is not None and default != {}}
    conversion = words(GRPO, *(f"{path}={json.dumps(default)}" for path, default in given.items()))
    assert set(given) <= {one.source for one in conversion.entries}


def test_grpo_is_what_verl_calculates() -> None:
    values = words(GRPO).values
    assert values[ALGORITHM + "policy_loss_type"] == "dual_clip"
    assert values[ALGORITHM + "kl_estimator_type"] == "k3"
    assert values[ALGORITHM + "kl_loss_coef"] == 0.01
    assert values["trainer.placement.colocate_all"] is True
    assert (values[ENGINE + "num_engines"], values["slurm.gpus_per_node"]) == (4, 8)
    assert values["generator.eval_sampling_params.temperature"] == 0.0
    assert values["environment.reward_function"] == {"by_data_source": 1.0}


def test_ppo_has_a_critic_and_its_divergence_in_the_reward(tmp_path: Path) -> None:
    config = load(words(PPO), tmp_path)
    algorithm = config.trainer.algorithm
    assert (algorithm.advantage_estimator, algorithm.gamma, algorithm.lambd, algorithm.value_clip) == (
        "gae",
        0.99,
        0.95,
        0.3,
    )
    assert (algorithm.use_kl_in_reward, algorithm.use_kl_loss) == (True, False)
    assert (algorithm.kl_loss_coef, algorithm.kl_estimator_type) == (0.002, "k1")
    assert config.trainer.critic.model.path == "Qwen/Qwen3-1.7B"
    assert config.trainer.critic.optimizer_config.lr == 2e-5
    assert config.trainer.critic.warmup_steps == 0
    assert load(words(f"{PPO} trainer.critic_warmup=20"), tmp_path).trainer.critic.warmup_steps == 19, "from step 20 on"


def test_dapo_filters_groups_and_shortens_responses(tmp_path: Path) -> None:
    config = load(words(DAPO), tmp_path)
    assert config.environment.reward_function == {"by_data_source": 1.0, "overlong": 1.0}
    assert config.environment.eval_reward_function == {"by_data_source": 1.0}
    assert (config.environment.overlong_reward.buffer_length, config.environment.overlong_reward.penalty_factor) == (
        512,
        0.5,
    )
    assert config.trainer.algorithm.dynamic_sampling.type == "filter"
    assert config.trainer.algorithm.eps_clip_high == 0.28
    assert config.trainer.policy.optimizer_config.num_warmup_steps == 10 * 64 // 16
    assert (config.generator.eval_sampling_params.temperature, config.generator.eval_sampling_params.top_p) == (
        0.6,
        0.7,
    )


@pytest.mark.parametrize(("metric", "kind"), [("reward", "mapped"), ("acc", "differs")])
def test_what_decides_whether_a_group_is_equal(metric: str, kind: str) -> None:
    """verl's default is the reward since September 2026, and was nothing before."""
    name = "algorithm.filter_groups.metric"
    conversion = words(GRPO, "algorithm.filter_groups.enable=True", f"{name}={metric}")
    assert [one.kind for one in conversion.entries if one.source == name] == [kind]
    assert words(GRPO, "algorithm.filter_groups.enable=True").values == conversion.values


def test_megatron_shares_its_gpus_and_recomputes_as_told(tmp_path: Path) -> None:
    config = load(words(MEGATRON), tmp_path)
    assert config.trainer.placement.colocate_all is True
    assert config.generator.inference_engine.max_num_seqs == 1024
    assert config.trainer.policy.model.lora.rank == 16
    assert config.trainer.policy.model.lora.target_modules == "all-linear"
    assert config.trainer.policy.megatron_config.tensor_model_parallel_size == 2
    assert config.trainer.ref.megatron_config.tensor_model_parallel_size == 2  # follows the actor's
    assert config.trainer.gradient_checkpointing is True
    plain = words(MEGATRON.replace("recompute_granularity=full", "recompute_granularity=null"))
    assert plain.values["trainer.gradient_checkpointing"] is False


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (f"{ACTOR}policy_loss.loss_mode=gspo", {"policy_loss_type": "gspo", "loss_reduction": "sequence_mean"}),
        (f"{ACTOR}policy_loss.loss_mode=cispo {ACTOR}clip_ratio_low=10", {"cispo.cispo_eps_clip_low": 1.0}),
        (f"{ACTOR}policy_loss.loss_mode=geo_mean {ACTOR}clip_ratio_high=0.4", {"gmpo.log_clip_high": 0.4}),
        (
            f"{ACTOR}loss_agg_mode=seq-mean-token-sum-norm",
            {"loss_reduction": "seq_mean_token_sum_norm", "max_seq_len": 512},
        ),
        (f"{ACTOR}loss_agg_mode=token-sum", {"loss_reduction": "token_sum"}),
        (f"{ACTOR}kl_loss_type=k3+", {"kl_estimator_type": "k2"}),
        (
            f"{ACTOR}use_kl_loss=False algorithm.use_kl_in_reward=True algorithm.kl_penalty=k3+",
            {"kl_estimator_type": "k3"},
        ),
        (f"{ACTOR}entropy_coeff=0.001", {"use_entropy_loss": True, "entropy_loss_coef": 0.001}),
        ("algorithm.rollout_correction.rollout_is=token", {"off_policy_correction.tis_ratio_type": "token"}),
        ("algorithm.adv_estimator=reinforce_plus_plus", {"advantage_estimator": "reinforce++"}),
        (
            f"algorithm.adv_estimator=tir_optimal_token_baseline {ACTOR}calculate_sum_pi_squared=True",
            {"advantage_estimator": "optimal_token_baseline"},
        ),
        (
            f"algorithm.adv_estimator=grpo_passk {ROLLOUT}n=6",
            {"advantage_estimator": "pass_at_k", "pass_at_k.k": 6, "grpo_norm_by_std": True},
        ),
        ("algorithm.norm_adv_by_std_in_grpo=False", {"grpo_norm_by_std": False}),
    ],
)
def test_algorithms(given: str, expected: dict[str, Any], tmp_path: Path) -> None:
    conversion = words(f"{GRPO} {given}")
    assert {name: conversion.values[ALGORITHM + name] for name in expected} == expected
    load(conversion, tmp_path)


# What is lost is said


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (f"{ROLLOUT}name=sglang", "vllm replaces it"),
        (f"{ROLLOUT}multi_turn.enable=True", "environment of several turns"),
        (f"{ROLLOUT}multi_turn.tool_config_path=tools.yaml", "classes of verl"),
        ("custom_reward_function.path=score.py", "rewrite it"),
        ("reward_model.enable=True", "environment.reward_model"),
        (f"{MODEL}trust_remote_code=True", "never run here"),
        ("algorithm.adv_estimator=gigpo", "there is no gigpo"),
        ("algorithm.rollout_correction.rollout_rs=token_k1", "1/upper and 1/lower"),
        (f"{ACTOR}policy_loss.loss_mode=own", "there is no own"),
        ("data.train_max_samples=100", "cut the file"),
        (f"{ACTOR}grad_clip=0.5", "give both the same value"),
        ("trainer.v1.trainer_mode=separate_async", "max_staleness_steps"),
        ("distillation.enabled=True", "trainer.distillation"),
        ("~data.shuffle=1", "deletes a setting"),
        ("--config-name=mine", "convert that file"),
        ("data.train_batch_sise=3", "did you mean data.train_batch_size"),
    ],
)
def test_what_has_no_place_is_refused_with_its_reason(given: str, reason: str, tmp_path: Path) -> None:
    conversion = words(GRPO, given)
    assert conversion.incomplete
    assert any(reason in message for message in complaints(conversion).values())
    with pytest.raises(ConfigError):
        load(conversion, tmp_path)


def test_nothing_is_lost_with_a_default_that_is_written_out() -> None:
    given = [f"{path}={json.dumps(value)}" for path, value in DEFAULTS.items() if isinstance(TARGETS[path], Dropped)]
    assert not complaints(words(GRPO, *(word for word in given if not word.endswith("null"))))


def test_rewards_are_chosen_by_the_data_source_of_each_row() -> None:
    conversion = words(GRPO, "data.train_files=[~/gsm8k/train.parquet, ~/math/train.parquet]")
    assert conversion.values["environment.reward_function"] == {"by_data_source": 1.0}
    assert not complaints(conversion)
    renamed = words(GRPO, "data.reward_fn_key=source")
    assert "column data_source" in complaints(renamed)["data.reward_fn_key"]


def test_the_penalty_for_length_is_of_dapos_manager() -> None:
    naive = words(DAPO.replace("reward_manager=dapo", "reward_manager=naive"))
    assert naive.values["environment.reward_function"] == {"by_data_source": 1.0}
    assert kinds(naive, "reward_model.reward_kwargs.overlong_buffer_cfg.len") == {"dropped"}


def test_bypass_mode_replaces_the_loss_and_its_correction(tmp_path: Path) -> None:
    bypass = "algorithm.rollout_correction.bypass_mode=True algorithm.rollout_correction.rollout_is=token"
    conversion = words(f"{GRPO} {bypass} {ACTOR}policy_loss.loss_mode=gspo")
    algorithm = load(conversion, tmp_path).trainer.algorithm
    assert (algorithm.policy_loss_type, algorithm.loss_reduction) == ("dual_clip", "token_mean")
    assert algorithm.use_rollout_logprobs_for_loss
    assert algorithm.off_policy_correction.tis_ratio_type is None
    assert kinds(conversion, "algorithm.rollout_correction.rollout_is") == {"dropped"}


def test_a_correction_changes_no_weight_of_the_token_baseline() -> None:
    baseline, correction = "algorithm.adv_estimator=optimal_token_baseline", "algorithm.rollout_correction."
    for given, differs in (
        (f"{correction}rollout_is=token", True),
        (f"{correction}rollout_is=token {correction}bypass_mode=True", False),
        ("", False),
    ):
        found = kinds(words(f"{GRPO} {baseline} {given}"), "algorithm.adv_estimator")
        assert ("differs" in found) == differs, given


def test_a_scale_without_a_norm_had_no_effect() -> None:
    conversion = words(GRPO, f"{ACTOR}loss_scale_factor=4")
    assert kinds(conversion, f"{ACTOR}loss_scale_factor") == {"dropped"}
    assert ALGORITHM + "max_seq_len" not in conversion.values


def test_clip_ratio_alone_had_no_effect() -> None:
    conversion = words(GRPO, f"{ACTOR}clip_ratio=0.4")
    assert kinds(conversion, f"{ACTOR}clip_ratio") == {"dropped"}
    assert conversion.values[ALGORITHM + "eps_clip_low"] == 0.2


# Files


SCRIPT = """
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-8B}
DATA=(data.train_files="${HOME}/gsm8k/train.parquet" data.train_batch_size=$((4 * 32)) algorithm.adv_estimator=grpo)
LAUNCH=(uv run python3)
"${LAUNCH[@]}" -m verl.trainer.main_ppo "${DATA[@]}" actor_rollout_ref.model.path="$MODEL_PATH" actor_rollout_ref.rollout.n=4 actor_rollout_ref.actor.ppo_mini_batch_size=64 \\
    actor_rollout_ref.rollout.name=vllm trainer.experiment_name=run_$(date +%m) trainer.logger='["console","wandb"]' "$@"
"""


def test_a_script_is_converted() -> None:
    conversion = convert_script(SCRIPT, "run.sh")
    assert not complaints(conversion)
    assert conversion.values["data.train_data"] == ["~/gsm8k/train.parquet"]
    assert conversion.values["trainer.train_batch_size"] == 128
    assert conversion.values["trainer.logger"] == ["console", "wandb"]


def test_the_kind_of_device_is_a_gpu() -> None:
    """Today's scripts ask for it in Python, and choose sizes by it."""
    probe = """
DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}
BATCH=128
case "${DEVICE}" in
    gpu) ;;
    npu) BATCH=16 ;;
    *) exit 1 ;;
esac
"""
    conversion = convert_script(probe + SCRIPT.replace("$((4 * 32))", "$BATCH"), "run.sh")
    assert not complaints(conversion)
    assert conversion.values["trainer.train_batch_size"] == 128
    assert kinds(conversion, "$DEVICE") == {"translated"}


def test_batch_options_of_a_script_become_settings_of_slurm(tmp_path: Path) -> None:
    lines = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --gpus-per-node=h100:8\n#SBATCH --time=1-12\n#SBATCH -p gpu\n"
    script, target = tmp_path / "run.slurm", tmp_path / "converted.toml"
    script.write_text(lines + SCRIPT)
    assert main(["config", "convert", str(script), "-o", str(target)]) == 0
    slurm = Config.from_toml([target]).slurm
    assert (slurm.gpus_per_node, slurm.time_minutes, slurm.partition) == ("h100:8", 36 * 60, "gpu")
    few = convert_script(lines.replace("h100:8", "4") + SCRIPT, "run.slurm")
    assert "8 GPUs on a node" in complaints(few)["#SBATCH --gpus-per-node=4"]


def test_yaml_and_command_say_the_same() -> None:
    text = """
    actor_rollout_ref: {model: {path: m}, rollout: {name: vllm, n: 4, response_length: "${data.max_response_length}"}}
    data: {train_files: gsm8k.parquet, max_response_length: 64}
    algorithm: {adv_estimator: grpo}
    """
    command = (
        f"{MODEL}path=m {ROLLOUT}name=vllm {ROLLOUT}n=4 data.train_files=gsm8k.parquet data.max_response_length=64"
    )
    assert convert_yaml(text, "f").values == words(command, "algorithm.adv_estimator=grpo").values


def test_the_command_knows_verl_by_what_stands_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, target = tmp_path / "run.sh", tmp_path / "converted.toml"
    script.write_text(SCRIPT)
    assert main(["config", "convert", str(script), "-o", str(target)]) == 0
    assert main(["config", "validate", str(target)]) == 0
    assert "verl's default" in capsys.readouterr().err
    assert main(["config", "convert", f"{MODEL}path=m", "data.train_files=gsm8k.parquet"]) == 0
