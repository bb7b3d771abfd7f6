"""Settings that SkyRL has got since March 2026, and defaults that it has changed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import get_scheduler

from hpcrl.convert.skyrl.convert import convert_yaml
from hpcrl.errors import ConfigError
from hpcrl.trainer.backends.schedule import lr_factor
from tests.convert.skyrl_material import ALGORITHM, CRITIC, ENGINE, command, entries, kinds, load

MEGATRON = "trainer.policy.megatron_config."
MOE = ("trainer.strategy=megatron", f"{MEGATRON}expert_model_parallel_size=1")


@pytest.mark.parametrize(
    ("words", "setting", "value"),
    [
        (["trainer.remove_microbatch_padding=false"], "trainer.use_sample_packing", False),
        (["trainer.max_training_steps=20"], "trainer.max_steps", 20),
        (["trainer.max_tokens_per_microbatch=9000"], "trainer.max_tokens_per_micro_batch", 9000),
        (["trainer.eval.interval=7"], "trainer.eval_interval", 7),
        (["trainer.eval.before_train=false"], "trainer.eval_before_train", False),
        (["trainer.logprobs_chunk_size=512"], "trainer.logprobs_chunk_size", 512),
        ([*MOE, f"{MEGATRON}moe_aux_loss_coeff=0.01"], f"{MEGATRON}transformer_config_kwargs.moe_aux_loss_coeff", 0.01),
        ([*MOE, f"{MEGATRON}moe_router_dtype=fp64"], f"{MEGATRON}transformer_config_kwargs.moe_router_dtype", "fp64"),
        (
            [*MOE, f"{MEGATRON}freeze_moe_router=true"],
            "trainer.policy.freeze_pattern",
            [r"\.mlp\.(gate|router)\.weight$"],
        ),
        ([*MOE, f"{MEGATRON}async_dist_ckpt_save=false"], "trainer.ckpt_mode", "sync"),
        (
            [*MOE, f"{MEGATRON}moe_enable_routing_replay=true", f"{ENGINE}enable_return_routed_experts=true"],
            "trainer.policy.experts.router_replay",
            "R3",
        ),
        ([f"{ENGINE}language_model_only=true"], f"{ENGINE}engine_init_kwargs.language_model_only", True),
        ([f"{ALGORITHM}policy_loss_type=dppo", f"{ALGORITHM}dppo.delta_low=0.1"], f"{ALGORITHM}dppo.delta_low", 0.1),
        (
            [f"{ALGORITHM}zero_variance_filter=true", f"{ALGORITHM}zero_variance_filter_tol=0.5"],
            f"{ALGORITHM}zero_variance_filter_tol",
            0.5,
        ),
        (
            [f"{ALGORITHM}policy_loss_type=cispo", f"{ALGORITHM}cispo.cispo_anchor=rollout"],
            f"{ALGORITHM}use_rollout_logprobs_for_loss",
            True,
        ),
        (
            ["trainer.policy.torch_profiler_config.enable=true", "trainer.policy.torch_profiler_config.wait=2"],
            "trainer.profiler.wait_steps",
            12,
        ),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) and value else None,
)
def test_a_setting_has_its_place(words: list[str], setting: str, value: Any, tmp_path: Path) -> None:
    conversion = command(*words)
    assert conversion.values[setting] == value
    assert not conversion.incomplete
    load(conversion, tmp_path)


SCHEDULES = (
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "polynomial",
    "inverse_sqrt",
    "cosine_with_restarts",
)


@pytest.mark.parametrize("name", SCHEDULES)
def test_learning_rates_are_those_of_the_source(name: str, tmp_path: Path) -> None:
    words = {"scheduler": name, "num_warmup_steps": 9, "lr": 3e-6}
    models = {model: f"trainer.{model}.optimizer_config." for model in ("policy", "critic")}
    conversion = command(
        CRITIC, *(f"{model}{key}={value}" for model in models.values() for key, value in words.items())
    )
    assert not conversion.incomplete
    trainer = load(conversion, tmp_path).trainer
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=3e-6)
    theirs = get_scheduler(name, optimizer, 9, 40)
    for update in range(40):
        expected = pytest.approx(theirs.get_last_lr()[0] / 3e-6, rel=0, abs=1e-9)
        assert lr_factor(trainer.policy.optimizer_config, update, 40) == expected
        assert lr_factor(trainer.critic.optimizer_config, update, 40) == expected
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize("name", ["cosine_with_min_lr", "warmup_stable_decay"])
def test_schedules_that_fail_at_the_source_are_refused(name: str) -> None:
    path = "trainer.policy.optimizer_config.scheduler"
    conversion = command(f"{path}={name}")
    assert f"{name} fails in SkyRL" in conversion.unconverted[path]
    assert path not in conversion.values
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1e-6)
    with pytest.raises((TypeError, ValueError)):
        get_scheduler(name, optimizer, 0, 40)


def test_fully_asynchronous_training_by_a_setting(tmp_path: Path) -> None:
    one = ("trainer.fully_async.enabled=true", "trainer.placement.colocate_all=false", "trainer.train_batch_size=256")
    sampled = ("trainer.fully_async.sample_full_batch=true", f"{ALGORITHM}zero_variance_filter=true")
    kept = "trainer.fully_async.clear_kv_cache_on_weight_sync=false"
    config = load(command("-m", "skyrl.train.entrypoints.main_base", *one, *sampled, kept), tmp_path)
    assert config.trainer.fully_async.max_staleness_steps == 4
    assert config.trainer.algorithm.dynamic_sampling.type == "filter"
    assert not config.trainer.algorithm.zero_variance_filter
    assert config.generator.inference_engine.keep_cache_on_update


@pytest.mark.parametrize(
    "word",
    [
        "trainer.mtp.enabled=true",
        "trainer.policy.model.fake_int4_qat.enabled=true",
        "trainer.policy.inference_only_init=true",
        f"{ENGINE}serialized_weight_sync_mode=blockwise",
    ],
)
def test_what_changes_a_run_and_has_no_place_is_a_conflict(word: str) -> None:
    name, _, value = word.partition("=")
    assert kinds(command(word), name) == {"conflict"}
    off = {"true": "false", "blockwise": "null"}[value]
    assert kinds(command(f"{name}={off}"), name) == {"dropped"}


def test_bounds_of_cispo_that_are_left_out_are_told() -> None:
    conversion = command(f"{ALGORITHM}policy_loss_type=cispo", f"{ALGORITHM}cispo.cispo_eps_clip_low=0.5")
    assert conversion.values[f"{ALGORITHM}cispo.cispo_eps_clip_low"] == 0.5
    assert conversion.values[f"{ALGORITHM}cispo.cispo_eps_clip_high"] == 4.0
    (told,) = entries(conversion, f"{ALGORITHM}cispo.cispo_eps_clip_high")
    assert (told.kind, "it was 5.0" in told.message) == ("differs", True)
    assert entries(command(), f"{ALGORITHM}cispo.cispo_eps_clip_high") == []


def test_graphs_that_are_left_out_are_captured_as_in_skyrl_since_june(tmp_path: Path) -> None:
    path = f"{ENGINE}enforce_eager"
    assert load(command(), tmp_path).generator.inference_engine.enforce_eager is None
    assert "until then it was true" in entries(command(), path)[0].message
    assert kinds(command(f"{path}=true"), path) == {"mapped"}


def test_the_environment_of_dapo_is_direct_math(tmp_path: Path) -> None:
    assert load(command("environment.env_class=aime"), tmp_path).environment.env_class == "direct_math"
    penalty = (f"{ALGORITHM}overlong_buffer_len=512", f"{ALGORITHM}overlong_buffer_penalty_factor=1.0")
    environment = load(command("environment.env_class=aime", *penalty), tmp_path).environment
    assert environment.reward_function == {"direct_math": 1.0, "overlong": 1.0}
    assert environment.overlong_reward.buffer_length == 512


def test_the_reference_is_split_as_the_policy_on_its_ranks(tmp_path: Path) -> None:
    ref = "trainer.ref.megatron_config."
    words = (
        "trainer.strategy=megatron",
        f"{MEGATRON}tensor_model_parallel_size=2",
        f"{ref}pipeline_model_parallel_size=2",
    )
    ranks = [f"trainer.placement.{role}_num_gpus_per_node=4" for role in ("policy", "ref")]
    conversion = command(*words, *ranks)
    assert not conversion.incomplete
    assert kinds(conversion, f"{ref}pipeline_model_parallel_size") == {"translated"}
    layout = load(conversion, tmp_path).trainer.megatron_layout("ref")
    assert (layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size) == (2, 1)


def test_geometry3k_is_an_environment_here(tmp_path: Path) -> None:
    program = "examples/train/geometry3k/geometry3k_entrypoint.py"
    conversion = command("python", program, "environment.env_class=geometry3k", "generator.max_turns=3")
    assert not conversion.incomplete
    assert kinds(conversion, "environment.env_class") == {"mapped", "differs"}
    assert load(conversion, tmp_path).environment.env_class == "geometry3k"


@pytest.mark.parametrize("name", ["lcb", "searchcode"])
def test_environments_without_a_counterpart_are_named(name: str) -> None:
    conversion = command(f"environment.env_class={name}")
    assert f"{name} has no counterpart here" in conversion.unconverted["environment.env_class"]


def test_joined_steps_stay_samples_that_share_their_beginnings(tmp_path: Path) -> None:
    words = ("generator.max_turns=3", "generator.step_wise_trajectories=true", "generator.merge_stepwise_output=true")
    assert load(command(*words), tmp_path).trainer.shared_prefixes
    assert kinds(command(*words), "generator.merge_stepwise_output") == {"translated"}
    assert kinds(command(*words, f"{ALGORITHM}loss_reduction=sequence_mean"), "generator.merge_stepwise_output") == {
        "differs"
    }


def test_drafts_become_settings_of_their_own(tmp_path: Path) -> None:
    given = f"{ENGINE}speculative_config={{method: ngram, num_speculative_tokens: 3, prompt_lookup_max: 5, prompt_lookup_min: 2}}"
    own = load(command(given), tmp_path).generator.inference_engine.speculative
    assert own.options == {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 5,
    }
    assert kinds(command(f"{ENGINE}speculative_config=null"), f"{ENGINE}speculative_config") == {"mapped"}
    other = command(f"{ENGINE}speculative_config={{method: ngram, num_speculative_tokens: 3, max_model_len: 9}}")
    assert kinds(other, f"{ENGINE}speculative_config.max_model_len") == {"conflict"}


def test_prefill_apart_leaves_no_option_behind(tmp_path: Path) -> None:
    config = load(
        command(f"{ENGINE}engine_init_kwargs.kv_transfer_config.kv_connector=Nixl", f"{ENGINE}enable_pd=true"), tmp_path
    )
    assert config.generator.inference_engine.engine_init_kwargs == {}


@pytest.mark.parametrize(
    "text",
    [
        "resources: {accelerators: H100:8}\nrun: bash run.sh\nsetup: pip install x",
        "actor_rollout_ref: {model: {path: m}}\ndata: {train_files: a}\ntrainer: {n_gpus_per_node: 8}",
    ],
)
def test_yaml_of_others_is_recognized(text: str) -> None:
    with pytest.raises(ConfigError, match="no configuration of SkyRL; expected the sections data, trainer"):
        convert_yaml(text, "other.yaml")


def test_options_of_the_engine_that_have_a_setting(tmp_path: Path) -> None:
    options = f"{ENGINE}engine_init_kwargs={{quantization: fp8, max_model_len: 2048, numa_bind: true}}"
    conversion = command(options)
    assert conversion.values[f"{ENGINE}quantization"] == "fp8"
    assert conversion.values[f"{ENGINE}engine_init_kwargs"] == {"numa_bind": True}
    load(conversion, tmp_path)
    assert kinds(command(options, "trainer.max_prompt_length=1025"), f"{ENGINE}engine_init_kwargs.max_model_len") == {
        "conflict"
    }
