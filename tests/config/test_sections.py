"""What follows from the configuration."""

from dataclasses import replace
from typing import Any, Literal

import pytest

from hpcrl.config import Config, SamplingParams
from hpcrl.config.sections.generator import EvalSamplingParams
from hpcrl.config.sections.model import FSDPConfig
from hpcrl.config.sections.trainer import steps_per_epoch
from hpcrl.config.token_limits import micro_batch_tokens
from hpcrl.errors import DataError
from hpcrl.rundir.checkpoints import Retention
from tests.paths import CONFIGS


def config(**sections: Any) -> Config:
    trainer = {"policy": {"model": {"path": "m"}}, "eval_interval": 0, **sections.pop("trainer", {})}
    return Config.from_dict({"data": {"train_data": ["t"]}, "trainer": trainer, **sections})


def test_evaluation_is_greedy_with_the_training_length_unless_set() -> None:
    generator = config(generator={"sampling_params": {"max_generate_length": 7, "min_p": 0.5, "top_k": 9}}).generator
    assert generator.eval_sampling == SamplingParams(temperature=0.0, max_generate_length=7, min_p=0.5, top_k=9)
    chosen = replace(generator, eval_sampling_params=EvalSamplingParams(top_k=3))
    assert chosen.eval_sampling == SamplingParams(max_generate_length=7, min_p=0.5, top_k=3)


def test_temperature_follows_sampling_unless_set() -> None:
    assert config(generator={"sampling_params": {"temperature": 0.5}}).temperature == 0.5
    same = {"algorithm": {"temperature": 0.25}}
    assert config(trainer=same, generator={"sampling_params": {"temperature": 0.25}}).temperature == 0.25


def test_steps_drop_the_remainder_and_stop_at_max_steps() -> None:
    trainer = config(trainer={"train_batch_size": 8, "policy_mini_batch_size": 8, "epochs": 3}).trainer
    assert steps_per_epoch(31, trainer.train_batch_size) == 3
    assert trainer.total_steps(31) == 9
    assert trainer.total_steps(31, drop_last=False) == 11, "93 prompts"
    assert replace(trainer, max_steps=4).total_steps(31) == 4
    assert replace(trainer, max_steps=40).total_steps(31) == 9


def test_too_few_prompts_are_an_error_that_names_both_numbers() -> None:
    with pytest.raises(DataError, match=r"has 7 usable prompts.* trainer.train_batch_size = 8"):
        steps_per_epoch(7, 8)
    with pytest.raises(DataError, match="has 0 usable prompts"):
        steps_per_epoch(0, 8, drop_last=False)


def test_few_prompts_fill_a_batch_with_those_of_further_epochs() -> None:
    trainer = config(trainer={"train_batch_size": 8, "policy_mini_batch_size": 8, "epochs": 3}).trainer
    assert trainer.total_steps(3, drop_last=False) == 1, "9 prompts"
    assert steps_per_epoch(3, 8, drop_last=False) == 1
    with pytest.raises(
        DataError, match=r"trainer.epochs = 3 of them do not fill one batch of trainer.train_batch_size = 8"
    ):
        trainer.total_steps(2, drop_last=False)


def test_ranks_and_replicas() -> None:
    two = config(
        trainer={"placement": {"policy_num_nodes": 2, "policy_num_gpus_per_node": 4}}, slurm={"gpus_per_node": 8}
    )
    assert two.trainer.placement.policy_ranks == 8
    assert two.replicas_per_node == 8
    assert config(slurm={"gpus_per_node": 0}).replicas_per_node == 1
    assert config(slurm={"replicas_per_node": 2}).replicas_per_node == 2
    wide = config(generator={"inference_engine": {"tensor_parallel_size": 3}}, slurm={"gpus_per_node": 8})
    assert wide.replicas_per_node == 2


def test_which_ranks_share_a_copy() -> None:
    """A node's, where 16 ranks on two nodes have room for three times what they hold; never where that is not known."""
    assert [FSDPConfig(fsdp_size=size).copy_ranks(16, 8) for size in (-1, 4, 99)] == [16, 4, 16]
    unset = FSDPConfig()
    assert [unset.copy_ranks(16, 8, state, 30.0) for state in (80.0, 81.0)] == [8, 16]
    assert unset.copy_ranks(16, 8, 80.0) == 16
    assert [unset.copy_ranks(ranks, 8, 80.0, 30.0) for ranks in (8, 12)] == [8, 12]
    assert FSDPConfig(expert_parallel_size=16).copy_ranks(16, 8, 80.0, 30.0) == 16, "experts are within a copy"


@pytest.mark.parametrize(
    ("sections", "own"),
    [
        ({}, False),
        ({"environment": {"env_class": "gsm8k"}}, False),
        ({"environment": {"reward_function": {"format": 1.0}}}, False),
        ({"environment": {"env_class": "tests.rollout.environments:CountLetters"}}, True),
        ({"environment": {"allowed_env_classes": ["tests.rollout.environments:CountLetters"]}}, True),
        ({"environment": {"names": {"letters": "tests.rollout.environments:CountLetters"}}}, True),
        ({"environment": {"reward_function": {"tests.rollout.test_rewards:length": 1.0}}}, True),
        ({"python_path": ["."]}, True),
    ],
)
def test_code_of_the_users(sections: dict[str, Any], own: bool) -> None:
    assert config(**sections).names_own_code == own


def of_type(strategy: str, dtype: str) -> dict[str, Any]:
    """Return what says the number type of a model."""
    megatron, fsdp = {"megatron_config": {"dtype": dtype}}, {"fsdp_config": {"mixed_precision": {"param_dtype": dtype}}}
    return megatron if strategy == "megatron" else fsdp


@pytest.mark.parametrize("strategy", ["fsdp2", "megatron"])
def test_the_reference_is_the_policy_without_its_adapters_where_both_are_alike(strategy: str) -> None:
    def found(rank: int, dtype: str = "fp32", path: str = "m") -> bool:
        policy = {"model": {"path": "m", "lora": {"rank": rank}}, **of_type(strategy, "fp32")}
        ref = {"model": {"path": path}, **of_type(strategy, dtype)}
        return config(trainer={"strategy": strategy, "policy": policy, "ref": ref}).trainer.reference_is_base

    assert found(8)
    assert not found(0)
    assert not found(8, dtype="bf16")
    assert not found(8, path="other")


def test_tokens_limit_passes_on_gpus_but_not_those_of_pictures() -> None:
    gpus = {"slurm": {"gpus_per_node": 8}}
    assert micro_batch_tokens(config(**gpus)) is not None
    pictures = Config.from_toml(
        [CONFIGS / "diffusion_sft_tiny.toml"],
        ["slurm.gpus_per_node=8", "trainer.micro_train_batch_size_per_gpu=default"],
    )
    assert micro_batch_tokens(pictures) is None  # a row has twenty tokens, and a picture


@pytest.mark.parametrize(
    ("metric", "mode"),
    [
        ("eval/all/loss", "min"),
        ("policy/final_loss", "min"),
        ("eval/math/perplexity", "min"),
        ("eval/all/avg_score", "max"),
        ("eval/all/pass_at_4", "max"),
        ("reward/avg_pass_at_8", "max"),
        ("reward/avg_raw_reward", "max"),
        ("eval/all/rewards/accuracies", "max"),
        ("environment/tries", None),
        ("generate/avg_tokens_non_zero_rewards", None),
        ("eval/all/rewards/rejected", None),
    ],
)
def test_the_name_of_a_metric_says_which_value_is_the_best(metric: str, mode: Literal["max", "min"] | None) -> None:
    unknown = replace(config().trainer, ckpt_keep_best=metric)
    assert unknown.best_mode == mode
    if mode:
        sections = {"data": {"train_data": ["t"], "val_data": ["v"]}}
        trainer = config(trainer={"ckpt_keep_best": metric, "eval_interval": 1}, **sections).trainer
        assert Retention.of(trainer).mode == mode
        other: Literal["max", "min"] = "min" if mode == "max" else "max"
        assert Retention.of(replace(trainer, ckpt_keep_best_mode=other)).mode == other
