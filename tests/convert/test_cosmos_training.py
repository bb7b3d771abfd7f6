"""Cosmos-RL's settings of training converted: batches, losses, parallelism, optimizer, checkpoints."""

from pathlib import Path
from typing import Any

import pytest

from hpcrl.config import Config
from hpcrl.config.load import nested
from hpcrl.config.sections.megatron import LAYOUT
from hpcrl.config.sections.tree import ConfigTree
from hpcrl.config.validate import build
from hpcrl.convert.conversion import Conversion
from hpcrl.errors import ConfigError
from hpcrl.trainer.backends.schedule import lr_factor
from tests.convert.cosmos_material import conflicts, converted, entries, of, one_replica


def test_shards_that_the_source_counts_itself() -> None:
    conversion = converted("03")
    assert conversion.values["trainer.placement.policy_num_gpus_per_node"] == 4  # 2 stages x 2 parts of a sample
    assert conversion.values["trainer.policy.megatron_config.context_parallel_size"] == 2
    assert list(conflicts(conversion)) == ["policy.parallelism.dp_shard_size"]


def test_batches_that_do_not_divide() -> None:
    policy = {"type": "grpo", "batch_size_per_optimize": 24}
    conversion = of(
        {"train": {"train_batch_per_replica": 100, "train_policy": policy}, "policy": one_replica(n_init_replicas=2)}
    )
    assert conversion.values["trainer.train_batch_size"] == 13  # 200 samples in groups of 16
    assert conversion.values["trainer.policy_mini_batch_size"] == 1  # 13 has no other divisor
    assert conflicts(conversion).keys() >= {
        "train.train_batch_per_replica",
        "train.train_policy.batch_size_per_optimize",
    }
    assert "rounded up to 208, 13 x 16" in conflicts(conversion)["train.train_batch_per_replica"]


def test_several_optimizer_steps() -> None:
    policy = {"type": "grpo", "batch_size_per_optimize": 16, "mu_iterations": 3}
    train = {"train_batch_per_replica": 128, "optm_warmup_steps": 5, "train_policy": policy}
    values = of({"train": train, "policy": one_replica(dp_shard_size=2)}).values
    assert values["trainer.train_batch_size"] == 8
    assert values["trainer.policy_mini_batch_size"] == 2  # 64 samples of a rank in 4 parts
    assert values["trainer.policy.optimizer_config.num_warmup_steps"] == 5 * 4 * 3


@pytest.mark.parametrize(
    ("policy", "loss"),
    [
        ({"variant": "grpo"}, "dual_clip"),
        ({"variant": "dapo"}, "dual_clip"),
        ({"variant": "gspo"}, "gspo"),
        ({"variant": "gspo", "aipo_rho": 2.5}, "aipo"),
    ],
)
def test_losses(policy: dict[str, Any], loss: str) -> None:
    values = of({"train": {"train_policy": {"type": "grpo", **policy}}}).values
    algorithm = "trainer.algorithm"
    assert values[f"{algorithm}.policy_loss_type"] == loss
    assert values.get(f"{algorithm}.dynamic_sampling.type") == ("filter" if policy["variant"] == "dapo" else None)
    assert (f"{algorithm}.clip_ratio_c" in values) is (loss == "dual_clip")
    assert values.get(f"{algorithm}.aipo_rho") == policy.get("aipo_rho")


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({"loss_type": "token-mean", "balance_dp_token": True}, {"loss_reduction": "token_mean"}),
        ({"loss_type": "seq-mean-token-sum"}, {"loss_reduction": "seq_mean_token_sum"}),
        (
            {"loss_type": "seq-mean-token-mean", "unbiased_loss_max_tokens": 100},
            {"loss_reduction": "seq_mean_token_mean", "unbiased_loss_max_tokens": 100},
        ),
        ({"unbiased_advantage": True}, {"grpo_norm_by_std": False}),
        ({"kl_beta": 0.01}, {"use_kl_loss": True, "kl_loss_coef": 0.01}),
        ({"entropy_coeff": 0.02}, {"use_entropy_loss": True, "entropy_loss_coef": 0.02}),
        ({"epsilon_low": 0.1, "epsilon_high": -1}, {"eps_clip_low": 0.1, "eps_clip_high": 1e9}),
        ({"temperature": 0}, {"temperature": None}),
        (
            {"use_decoupled_loss": True, "behav_imp_weight_cap": 4.0},
            {
                "off_policy_correction.tis_ratio_type": "token",
                "off_policy_correction.token_tis_ratio_clip_high": 1e9,
                "off_policy_correction.token_tis_ratio_drop_high": 4.0,
            },
        ),
        ({"off_policy_masking_delta": 0.3}, {"off_policy_correction.negative_sample_mask_delta": 0.3}),
        ({"unbiased_kl_estimate": True, "kl_beta": 0.1}, {"kl_importance_weighted": True}),
    ],
)  # fmt: skip
def test_algorithm(policy: dict[str, Any], expected: dict[str, Any]) -> None:
    values = of({"train": {"train_policy": {"type": "grpo", **policy}}}).values
    assert {name: values[f"trainer.algorithm.{name}"] for name in expected} == expected


def test_an_unknown_loss_type_is_a_conflict() -> None:
    found = conflicts(of({"train": {"train_policy": {"type": "grpo", "loss_type": "mean"}}}))
    assert "expected one of token-mean" in found["train.train_policy.loss_type"]


def test_parallelism_without_megatron() -> None:
    values = of({"policy": one_replica(cp_size=2, dp_shard_size=4, n_init_replicas=3)}).values
    assert "trainer.strategy" not in values
    assert values["trainer.policy.sequence_parallel_size"] == 2
    assert "trainer.ref.sequence_parallel_size" not in values, "as the policy"
    assert values["trainer.policy.fsdp_config.fsdp_size"] == 8  # of 24 ranks
    assert (values["trainer.placement.policy_num_nodes"], values["trainer.placement.policy_num_gpus_per_node"]) == (
        3,
        8,
    )


def test_tokens_of_a_micro_batch_are_those_of_all_ranks_that_share_it() -> None:
    limited = {"train_policy": {"type": "grpo", "max_token_len_per_mini_batch": 1000}}
    for size, expected in ((1, 1000), (2, 2000)):
        values = of({"train": limited, "policy": one_replica(cp_size=size)}).values
        assert values["trainer.max_tokens_per_micro_batch"] == expected


def test_optimizer() -> None:
    train = {
        "optm_lr": {"global": 1e-6, "model.visual": 1e-5},
        "optm_impl": ["fused", "fused"],
        "optm_warmup_steps": 0.1,
        "optm_decay_type": "cosine",
        "optm_decay_ratio": 0.5,
        "optm_min_lr_factor": 0.1,
        "fsdp_reshard_after_forward": "never",
    }
    conversion = of({"train": train, "policy": {"parallelism": {"tp_size": 1}}})
    optimizer = {
        path.rpartition(".")[2]: value for path, value in conversion.values.items() if ".optimizer_config." in path
    }
    assert (optimizer["lr"], optimizer["implementation"], optimizer["warmup_ratio"]) == (1e-6, "fused", 0.1)
    assert (optimizer["scheduler"], optimizer["decay_ratio"], optimizer["min_lr_factor"]) == ("cosine", 0.5, 0.1)
    assert "num_warmup_steps" not in optimizer
    assert conversion.values["trainer.policy.fsdp_config.reshard_after_forward"] is False
    assert list(conflicts(conversion)) == ["train.optm_lr"]


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        ({}, {"ckpt_interval": -1, "hf_save_interval": -1}),
        ({"ckpt": {"enable_checkpoint": True, "save_freq": 7}}, {"ckpt_interval": 7, "hf_save_interval": 7}),
        (
            {"ckpt": {"enable_checkpoint": True, "export_safetensors": False, "save_freq_in_epoch": 2}},
            {"ckpt_interval_epochs": 2},
        ),
        (
            {"ckpt": {"enable_checkpoint": True, "upload_s3": "all", "s3_bucket": "mine", "max_keep": 0}},
            {"upload.s3": "all", "upload.s3_bucket": "mine", "max_ckpts_to_keep": 1},
        ),
        (
            {
                "ckpt": {
                    "enable_checkpoint": True,
                    "export_safetensors": False,
                    "upload_hf": True,
                    "hf_repo_name": "mine",
                }
            },
            {"upload.hf": True, "upload.hf_repo_name": "mine", "hf_save_interval": 20},
        ),
        ({"resume": True}, {"resume_mode": "latest"}),
    ],
)
def test_checkpoints(train: dict[str, Any], expected: dict[str, Any]) -> None:
    conversion = of({"train": train})
    assert {name: conversion.values[f"trainer.{name}"] for name in expected} == expected
    assert not conflicts(conversion)


def test_a_checkpoint_of_cosmos_cannot_be_continued() -> None:
    conversion = of({"train": {"resume": "outputs/1/checkpoints/step_10/policy"}})
    assert "cannot be read here" in conflicts(conversion)["train.resume"]


def test_patterns_of_what_is_trained() -> None:
    import re

    values = of({"policy": {"trainable_pattern": [r"^visual\.", "lm_head"]}}).values
    (frozen,) = values["trainer.policy.freeze_pattern"]
    names = ["visual.block.weight", "model.layers.0.weight", "model.visual.weight", "lm_head.weight"]
    assert [bool(re.search(frozen, name)) for name in names] == [False, True, True, False]


def test_fine_tuning_loads_a_batch_on_each_rank() -> None:
    policy = {"model_name_or_path": "m", **one_replica(dp_shard_size=4, dp_replicate_size=2, tp_size=2)}
    train = {"train_batch_per_replica": 8, "train_policy": {"type": "sft"}}
    values = of({"train": train, "policy": policy}).values
    assert values["trainer.train_batch_size"] == values["trainer.policy_mini_batch_size"] == 64


def test_a_warm_up_counts_the_optimizer_steps_that_there_are() -> None:
    policy = {"type": "grpo", "batch_size_per_optimize": 6, "mu_iterations": 2}
    tree = {"train": {"optm_warmup_steps": 5, "train_batch_per_replica": 16, "train_policy": policy}}
    conversion = of({**tree, "rollout": {"n_generation": 4}, "policy": one_replica()})
    values = conversion.values
    assert (values["trainer.train_batch_size"], values["trainer.policy_mini_batch_size"]) == (4, 1)
    assert "3 optimizer steps" in conflicts(conversion)["train.train_policy.batch_size_per_optimize"]
    assert values["trainer.policy.optimizer_config.num_warmup_steps"] == 5 * 4 * 2


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"optm_warmup_steps": 5}, "of January 2026"),
        ({"optm_warmup_steps": 0.1, "optm_warmup_start_factor": 0.2}, "since optm_warmup_start_factor"),
        ({"optm_warmup_steps": 0}, None),
    ],
)
def test_the_version_whose_warm_up_counts_is_said(settings: dict[str, float], said: str | None) -> None:
    conversion = of({"train": settings})
    (entry,) = entries(conversion, "train.optm_warmup_steps")
    assert entry.kind == ("mapped" if said is None else "translated")
    assert (said or "") in entry.message


def test_numbers_that_come_out_otherwise_are_said() -> None:
    conversion = of({"train": {"train_policy": {"type": "grpo", "entropy_coeff": 0.1}}, "rollout": {"n_generation": 2}})
    told = {entry.source.rpartition(".")[2]: entry.message for entry in conversion.entries if entry.kind == "differs"}
    assert told.keys() == {"unbiased_advantage", "entropy_coeff"}
    assert "0.707 times" in told["unbiased_advantage"]
    assert "differs       train.train_policy.entropy_coeff" in conversion.to_toml()
    quiet = of({"train": {"train_policy": {"type": "grpo", "unbiased_advantage": True}}})
    assert not [entry for entry in quiet.entries if entry.kind == "differs"]


def test_sums_of_tokens_have_another_scale() -> None:
    conversion = of({"train": {"train_policy": {"type": "grpo", "loss_type": "token-sum"}}})
    (entry,) = entries(conversion, "train.train_policy.loss_type")
    assert entry.kind == "translated"
    assert "max_grad_norm" in entry.message


def test_checkpoints_by_epochs() -> None:
    ckpt = {"enable_checkpoint": True, "save_freq_in_epoch": 2, "export_safetensors": False}
    conversion = of({"train": {"train_policy": {"type": "grpo"}, "ckpt": ckpt}})
    (entry,) = entries(conversion, "train.ckpt.enable_checkpoint")
    assert (entry.kind, entry.target) == ("translated", "trainer.ckpt_interval_epochs")


def test_fine_tuning_on_no_replica_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"policy\.parallelism\.n_init_replicas: expected at least 1, found 0"):
        of({"train": {"train_policy": {"type": "sft"}}, "policy": {"parallelism": {"n_init_replicas": 0}}})


def test_the_reference_is_spread_as_the_policy() -> None:
    parallelism = {"tp_size": 2, "pp_size": 2, "ep_size": 1, "pp_schedule": "Interleaved1F1B", "dp_shard_size": 1}
    conversion = of(
        {"policy": {"parallelism": parallelism}, "train": {"train_policy": {"type": "grpo", "kl_beta": 0.1}}}
    )
    tree = build(ConfigTree, nested(conversion.values | {"data.train_data": ["t"], "trainer.policy.model.path": "m"}))
    policy, ref = (tree.trainer.megatron_layout(role) for role in ("policy", "ref"))
    assert all(getattr(ref, name) == getattr(policy, name) for name in LAYOUT)
    assert (ref.tensor_model_parallel_size, ref.pipeline_schedule) == (2, "Interleaved1F1B")


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({"optm_warmup_steps": 4}, [0.25, 0.5, 0.75, 1.0, 1.0]),
        ({"optm_warmup_steps": 1}, [1.0, 1.0, 1.0, 1.0, 1.0]),
        ({"optm_warmup_steps": 0}, [1.0, 1.0, 1.0, 1.0, 1.0]),
        ({"optm_warmup_steps": 0.4}, [0.25, 0.5, 0.75, 1.0, 1.0]),
        ({"optm_warmup_steps": 4, "optm_warmup_start_factor": 0.0}, [0.0, 1 / 3, 2 / 3, 1.0, 1.0]),
        ({"optm_warmup_steps": 4, "optm_warmup_start_factor": 0.25}, [0.25, 0.5, 0.75, 1.0, 1.0]),
        ({"optm_warmup_steps": 2, "optm_decay_type": "linear"}, [0.5, 1.0, 1.0, 0.875, 0.75]),
    ],
)
def test_a_converted_file_has_the_rate_of_its_source_at_every_step(
    settings: dict[str, float], rates: list[float], tmp_path: Path
) -> None:
    (tmp_path / "converted.toml").write_text(of({"train": settings, "policy": one_replica()}).to_toml())
    optimizer = Config.from_toml([tmp_path / "converted.toml"]).trainer.policy.optimizer_config
    assert [lr_factor(optimizer, step, 10) for step in range(5)] == pytest.approx(rates)
    assert optimizer.lr == 1e-6


def test_a_teacher_whose_ranks_share_its_layers() -> None:
    own, shared = "trainer.distillation", {"tp_size": 4, "pp_size": 2, "dp_shard_size": 1}

    def distilled(**sizes: int) -> Conversion:
        teacher = {"enable": True, "model_name_or_path": "t", "parallelism": shared | sizes}
        return of({"train": {"train_policy": {"type": "grpo"}}, "policy": one_replica(), "distillation": teacher})

    values = distilled().values
    assert values[f"{own}.backend"] == "megatron"
    assert values[f"{own}.placement.tensor_parallel_size"] == 4
    assert values[f"{own}.placement.pipeline_parallel_size"] == 2
    assert f"{own}.placement.fsdp_size" not in values
    path = "distillation.parallelism.dp_shard_size"
    assert path not in conflicts(distilled())
    assert "(tp_size, pp_size) is not sharded besides" in conflicts(distilled(dp_shard_size=2))[path]
    plain = distilled(tp_size=1, pp_size=1, dp_shard_size=2).values
    assert plain[f"{own}.placement.fsdp_size"] == 2
    assert f"{own}.backend" not in plain
    shared = distilled(tp_size=1, pp_size=1, dp_shard_size=2, cp_size=2).values
    assert shared[f"{own}.placement.fsdp_size"] == 4
    assert shared[f"{own}.placement.sequence_parallel_size"] == 2
    assert f"{own}.backend" not in shared


def test_engines_on_the_policys_gpus() -> None:
    tree = {
        "mode": "colocated",
        "train": {"train_policy": {"type": "grpo", "dataset": {"name": "d"}}},
        "policy": {"model_name_or_path": "m", **one_replica(dp_shard_size=4)},
        "rollout": {"parallelism": {"tp_size": 2, "dp_shard_size": 1}},
    }
    values = of(tree).values
    assert values["trainer.placement.colocate_all"] is True
    assert values["generator.inference_engine.num_engines"] == 2


def test_a_diffusion_model_that_learns_pictures() -> None:
    train = {"train_policy": {"type": "sft", "trainer_type": "diffusers_sft", "dataset": {"name": "./pictures.jsonl"}}}
    settings = {"weighting_scheme": "mode", "logit_mean": 0.1}
    conversion = of({"train": train, "policy": {**one_replica(), "is_diffusers": True, "diffusers": settings}})
    assert not conflicts(conversion)
    assert conversion.values["trainer.mode"] == "sft"
    assert conversion.values["trainer.policy.diffusers.weighting_scheme"] == "mode"


def test_a_diffusion_model_of_videos_that_a_service_rewards() -> None:
    policy = {"type": "grpo", "trainer_type": "diffusion_nft", "use_remote_reward": True, "kl_beta": 0.1}
    tree = {
        "train": {"compile": False, "train_policy": {**policy, "dataset": {"name": "./prompts.jsonl"}}},
        "rollout": {"backend": "diffusion_nft_rollout", "parallelism": {"tp_size": 1}},
        "policy": {
            **one_replica(),
            "is_diffusers": True,
            "lora": {"r": 32},
            "diffusers": {"is_video": True, "train_frames": 9, "sample": {"deterministic_sampling": True}},
        },
    }
    conversion = of(tree)
    assert not conflicts(conversion)
    assert conversion.values["trainer.policy.diffusers.train_frames"] == 9
    assert conversion.values["environment.remote_reward.reward_function"] == {"dance_grpo": 1.0}
