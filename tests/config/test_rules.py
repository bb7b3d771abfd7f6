"""Every rule about combinations refuses what cannot work, by path and with the remedy, and nothing that can."""

from __future__ import annotations

import ast
import inspect
import sys
from types import FrameType
from typing import Any, NamedTuple

import pytest

from hpcrl.config import Config, generation, layouts, ranks, rules, scoring, site, strategy, training
from hpcrl.config.load import nested
from hpcrl.config.problem import Problem
from hpcrl.config.rules import impossible
from hpcrl.config.surface import leaves
from hpcrl.config.validate import build
from tests.config.test_layouts import CASES as LAYOUTS
from tests.config.test_rules_trainer import CASES as TRAINER

BASE = {"data.train_data": ["t"], "data.val_data": ["v"], "trainer.policy.model.path": "m"}

ALGORITHM = "trainer.algorithm"
CORRECTION = "trainer.algorithm.off_policy_correction"
DIFFUSERS = "trainer.policy.diffusers"
DISTILLATION = "trainer.distillation"
ENGINE = "generator.inference_engine"
LORA = "trainer.policy.model.lora"
MEGATRON = "trainer.policy.megatron_config"
OPTIMIZER = "trainer.policy.optimizer_config"
PLACEMENT = "trainer.placement"
CRITIC = {"trainer.critic.model.path": "c"}
FOUR_GPUS = {f"{PLACEMENT}.policy_num_gpus_per_node": 4}
COLOCATED = {f"{PLACEMENT}.colocate_all": True}
GYM = "environment.skyrl_gym"
SERVICE = {"environment.remote_reward.enable": True, "environment.remote_reward.reward_function": {"ocr": 1.0}}
NO_KL = {f"{ALGORITHM}.use_kl_loss": False}
STEP_WISE = {"generator.step_wise_trajectories": True, "generator.max_turns": 3}
MEGATRON_4 = {**FOUR_GPUS, **NO_KL, "trainer.strategy": "megatron"}


class Case(NamedTuple):
    """A combination that a rule refuses, where, with which words, and one nearby that it does not refuse."""

    rule: str
    wrong: dict[str, Any]
    path: str
    words: str
    right: dict[str, Any]


def found(settings: dict[str, Any]) -> list[Problem]:
    return impossible(build(Config, nested({**BASE, **settings})))


# spec/skyrl, section 8: what construction and validation refuse, where it applies here.
SKYRL = [
    Case(
        "the train batch is a multiple of the policy's mini-batch",
        {"trainer.train_batch_size": 100, "trainer.policy_mini_batch_size": 16},
        "trainer.train_batch_size", "expected a multiple of trainer.policy_mini_batch_size (16), found 100",
        {"trainer.train_batch_size": 96, "trainer.policy_mini_batch_size": 16},
    ),
    Case(
        "the train batch is not smaller than the mini-batch",
        {"trainer.train_batch_size": 160, "trainer.policy_mini_batch_size": 320},
        "trainer.train_batch_size", "expected a multiple of trainer.policy_mini_batch_size (320), found 160",
        {"trainer.train_batch_size": 320, "trainer.policy_mini_batch_size": 320},
    ),
    Case(
        "the train batch is a multiple of the critic's mini-batch",
        {"trainer.critic_mini_batch_size": 7, **CRITIC},
        "trainer.train_batch_size", "expected a multiple of trainer.critic_mini_batch_size (7), found 1024",
        {"trainer.critic_mini_batch_size": 7},
    ),
    Case(
        "mini-batch times samples is shared equally by the ranks, which SkyRL forgets",
        {**FOUR_GPUS, "trainer.policy_mini_batch_size": 2, "generator.n_samples_per_prompt": 3},
        "trainer.policy_mini_batch_size", "make the product a multiple of 4",
        {**FOUR_GPUS, "trainer.policy_mini_batch_size": 2, "generator.n_samples_per_prompt": 2},
    ),
    Case(
        "ranks that share a sample get one share",
        {**FOUR_GPUS, "trainer.policy.sequence_parallel_size": 2, "trainer.policy_mini_batch_size": 1},
        "trainer.policy_mini_batch_size", "make the product a multiple of 2",
        {**FOUR_GPUS, "trainer.policy.sequence_parallel_size": 4, "trainer.policy_mini_batch_size": 1},
    ),
    Case(
        "the critic's mini-batch is shared equally by the critic's ranks",
        {**CRITIC, f"{PLACEMENT}.critic_num_gpus_per_node": 3},
        "trainer.critic_mini_batch_size", "make the product a multiple of 3",
        {**CRITIC, f"{PLACEMENT}.critic_num_gpus_per_node": 5},
    ),
    Case(
        "samples suffice for the least common multiple of policy and reference ranks",
        {
            **FOUR_GPUS, f"{PLACEMENT}.ref_num_gpus_per_node": 6, f"{PLACEMENT}.colocate_policy_ref": False,
            "trainer.train_batch_size": 4, "trainer.policy_mini_batch_size": 4, "generator.n_samples_per_prompt": 1,
        },
        "trainer.train_batch_size", "fewer than 12",
        {
            **FOUR_GPUS, f"{PLACEMENT}.ref_num_gpus_per_node": 6, f"{PLACEMENT}.colocate_policy_ref": False, **NO_KL,
            "trainer.train_batch_size": 4, "trainer.policy_mini_batch_size": 4, "generator.n_samples_per_prompt": 1,
        },
    ),
    Case(
        "Ulysses divides the ranks",
        {**FOUR_GPUS, "trainer.policy.sequence_parallel_size": 3},
        "trainer.policy.sequence_parallel_size", "make the ranks a multiple of it",
        {**FOUR_GPUS, "trainer.policy.sequence_parallel_size": 2},
    ),
    Case(
        "Ulysses of the reference divides its ranks",
        {"trainer.ref.sequence_parallel_size": 2},
        "trainer.ref.sequence_parallel_size", "does not divide the 1 ranks",
        {"trainer.ref.sequence_parallel_size": 2, **NO_KL},
    ),
    Case(
        "tensor, pipeline and context parallel sizes divide the ranks",
        {**MEGATRON_4, f"{MEGATRON}.tensor_model_parallel_size": 2, f"{MEGATRON}.pipeline_model_parallel_size": 3},
        MEGATRON, "2 (tensor) x 3 (pipeline) x 1 (context) = 6 ranks share each sample, which does not divide the 4 ranks",
        {**MEGATRON_4, f"{MEGATRON}.tensor_model_parallel_size": 2, f"{MEGATRON}.pipeline_model_parallel_size": 2},
    ),
    Case(
        "gae needs a critic",
        {f"{ALGORITHM}.advantage_estimator": "gae"},
        "trainer.critic.model.path", "required with trainer.algorithm.advantage_estimator=gae",
        {f"{ALGORITHM}.advantage_estimator": "gae", **CRITIC},
    ),
    Case(
        "the critic's output layer has a name that a part of a model can have",
        {f"{ALGORITHM}.value_head_prefix": "value.head"},
        f"{ALGORITHM}.value_head_prefix", 'expected a name of letters, digits and underscores, found "value.head"',
        {f"{ALGORITHM}.value_head_prefix": "score_2"},
    ),
    Case(
        "KL in the loss and in the reward exclude each other",
        {f"{ALGORITHM}.use_kl_in_reward": True},
        f"{ALGORITHM}.use_kl_in_reward", "set trainer.algorithm.use_kl_loss=false",
        {f"{ALGORITHM}.use_kl_in_reward": True, **NO_KL},
    ),
    Case(
        "only a divergence in the reward has an adaptive weight",
        {f"{ALGORITHM}.kl_ctrl.type": "adaptive"},
        f"{ALGORITHM}.kl_ctrl.type", "has no effect without trainer.algorithm.use_kl_in_reward",
        {f"{ALGORITHM}.kl_ctrl.type": "adaptive", f"{ALGORITHM}.use_kl_in_reward": True, **NO_KL},
    ),
    Case(
        "FSDP1 cannot offload what it trains",
        {"trainer.strategy": "fsdp", "trainer.policy.fsdp_config.cpu_offload": True},
        "trainer.policy.fsdp_config.cpu_offload", "use trainer.strategy=fsdp2",
        {"trainer.strategy": "fsdp", "trainer.ref.fsdp_config.cpu_offload": True},
    ),
    Case(
        "checkpoints are kept",
        {"trainer.max_ckpts_to_keep": 0}, "trainer.max_ckpts_to_keep", "trainer.ckpt_interval=0 writes none",
        {"trainer.max_ckpts_to_keep": -1},
    ),
    Case(
        "where all checkpoints are kept, some more cannot be",
        {"trainer.ckpt_keep_every": 100}, "trainer.ckpt_keep_every", "set trainer.max_ckpts_to_keep",
        {"trainer.ckpt_keep_every": 100, "trainer.max_ckpts_to_keep": 3},
    ),
    Case(
        "where all checkpoints are kept, the best one is",
        {"trainer.ckpt_keep_best": "reward"}, "trainer.ckpt_keep_best", "set trainer.max_ckpts_to_keep",
        {"trainer.ckpt_keep_best": "reward", "trainer.max_ckpts_to_keep": 3},
    ),
    Case(
        "the best checkpoint has a score",
        {"trainer.ckpt_keep_best": "eval/all/avg_score", "trainer.max_ckpts_to_keep": 3, "trainer.eval_interval": 0},
        "trainer.ckpt_keep_best", "nothing is evaluated with trainer.eval_interval=0",
        {"trainer.ckpt_keep_best": "eval/all/avg_score", "trainer.max_ckpts_to_keep": 3, "trainer.eval_interval": 5},
    ),
    Case(
        "which value is the best is asked of a metric",
        {"trainer.ckpt_keep_best_mode": "min"}, "trainer.ckpt_keep_best_mode", "no effect without trainer.ckpt_keep_best",
        {"trainer.ckpt_keep_best_mode": "min", "trainer.ckpt_keep_best": "loss", "trainer.max_ckpts_to_keep": 3},
    ),
    Case(
        "the advantage estimator is known",
        {f"{ALGORITHM}.advantage_estimator": "grop"}, f"{ALGORITHM}.advantage_estimator", "did you mean grpo?",
        {f"{ALGORITHM}.advantage_estimator": "mine.advantages:better"},
    ),
    Case(
        "the policy loss is known",
        {f"{ALGORITHM}.policy_loss_type": "nope"}, f"{ALGORITHM}.policy_loss_type", '"package.module:function"',
        {f"{ALGORITHM}.policy_loss_type": "mine:loss"},
    ),
    Case(
        "colocated engines use the trainer's GPUs, all of them",
        {**COLOCATED, f"{ENGINE}.num_engines": 2},
        f"{PLACEMENT}.colocate_all", "the engines use 2 GPUs",
        {**COLOCATED, **FOUR_GPUS, f"{ENGINE}.num_engines": 2, f"{ENGINE}.tensor_parallel_size": 2},
    ),
    Case(
        "a colocated critic has the policy's GPUs",
        {**COLOCATED, **CRITIC, f"{PLACEMENT}.critic_num_gpus_per_node": 2},
        f"{PLACEMENT}.critic_num_gpus_per_node", "leave it out or set trainer.placement.colocate_all=false",
        {**CRITIC, f"{PLACEMENT}.critic_num_gpus_per_node": 2},
    ),
    Case(
        "a colocated reference has the policy's GPUs, though not by choice",
        {**COLOCATED, f"{PLACEMENT}.colocate_policy_ref": False, f"{PLACEMENT}.ref_num_nodes": 2},
        f"{PLACEMENT}.ref_num_nodes", "trainer.placement.colocate_all=false",
        {f"{PLACEMENT}.colocate_policy_ref": False, f"{PLACEMENT}.ref_num_nodes": 2},
    ),
    Case(
        "a reference that shares the policy's GPUs has as many",
        {f"{PLACEMENT}.ref_num_gpus_per_node": 2},
        f"{PLACEMENT}.ref_num_gpus_per_node", "set trainer.placement.colocate_policy_ref=false",
        {f"{PLACEMENT}.ref_num_gpus_per_node": 2, **NO_KL},
    ),
    Case(
        "with one turn the longest input is the longest prompt",
        {"generator.max_input_length": 1024}, "generator.max_input_length", "expected trainer.max_prompt_length (512)",
        {"generator.max_input_length": 1024, "generator.max_turns": 3},
    ),
    Case(
        "with several turns the longest input is no shorter than the longest prompt",
        {"generator.max_input_length": 77, "generator.max_turns": 3},
        "generator.max_input_length", "expected at least trainer.max_prompt_length (512), found 77",
        {"generator.max_input_length": 512, "generator.max_turns": 3},
    ),
    Case(
        "rewards by name pay after one turn",
        {"generator.max_turns": 3, "environment.reward_function.format": 1.0},
        "generator.max_turns", "no effect with environment.reward_function",
        {"generator.max_turns": 1, "environment.reward_function.format": 1.0},
    ),
    Case(
        "experts are shared by all ranks of a replica",
        {f"{ENGINE}.expert_parallel_size": 2}, f"{ENGINE}.expert_parallel_size", "expected 1 or data_parallel_size x tensor_parallel_size",
        {f"{ENGINE}.expert_parallel_size": 4, f"{ENGINE}.data_parallel_size": 2, f"{ENGINE}.tensor_parallel_size": 2},
    ),
    Case(
        "Megatron's types and shares are its own",
        {"trainer.strategy": "megatron", "trainer.policy.fsdp_config.mixed_precision.param_dtype": "fp32"},
        "trainer.policy.fsdp_config", "see trainer.policy.megatron_config, whose dtype",
        {"trainer.strategy": "megatron", f"{MEGATRON}.dtype": "fp32"},
    ),
    Case(
        "Megatron shares samples by context parallelism",
        {**MEGATRON_4, "trainer.policy.sequence_parallel_size": 2},
        "trainer.policy.sequence_parallel_size", "see trainer.policy.megatron_config.context_parallel_size",
        {**MEGATRON_4, f"{MEGATRON}.context_parallel_size": 2},
    ),
    Case(
        "Megatron packs",
        {"trainer.strategy": "megatron", "trainer.use_sample_packing": False},
        "trainer.use_sample_packing", "samples are always packed",
        {"trainer.use_sample_packing": False},
    ),
    Case(
        "FSDP2 has no layouts",
        {**FOUR_GPUS, f"{MEGATRON}.tensor_model_parallel_size": 2},
        MEGATRON, "no effect with trainer.strategy=fsdp2",
        {**MEGATRON_4, f"{MEGATRON}.tensor_model_parallel_size": 2},
    ),
    Case(
        "asynchronous training is not colocated",
        {**COLOCATED, "trainer.fully_async.max_staleness_steps": 1},
        f"{PLACEMENT}.colocate_all", "trainer.fully_async.max_staleness_steps must be 0",
        {"trainer.fully_async.max_staleness_steps": 1},
    ),
    Case(
        "no more groups are generated than staleness allows",
        {"trainer.fully_async.max_staleness_steps": 1, "trainer.fully_async.num_parallel_generation_workers": 2049},
        "trainer.fully_async.num_parallel_generation_workers", "expected from 1024 (trainer.train_batch_size) to 2048",
        {"trainer.fully_async.max_staleness_steps": 1, "trainer.fully_async.num_parallel_generation_workers": 2048},
    ),
    Case(
        "surplus groups are generated beside those that staleness allows",
        {"trainer.fully_async.oversampling_ratio": 1.25, "trainer.fully_async.num_parallel_generation_workers": 1281},
        "trainer.fully_async.num_parallel_generation_workers", "to 1280 (times max_staleness_steps + 1, and 256 of oversampling_ratio)",
        {"trainer.fully_async.oversampling_ratio": 1.25, "trainer.fully_async.num_parallel_generation_workers": 1280},
    ),
    Case(
        "resuming from a path needs the path",
        {"trainer.resume_mode": "from_path"}, "trainer.resume_path", 'required with trainer.resume_mode="from_path"',
        {"trainer.resume_mode": "from_path", "trainer.resume_path": "/c"},
    ),
    Case(
        "a template file needs a path",
        {"generator.chat_template.source": "file"}, "generator.chat_template.name_or_path", "a Jinja file",
        {"generator.chat_template.source": "file", "generator.chat_template.name_or_path": "t.jinja"},
    ),
    Case(
        "a template name is known",
        {"generator.chat_template.name_or_path": "qwen3"}, "generator.chat_template.name_or_path", "qwen3_with_thinking",
        {"generator.chat_template.name_or_path": "qwen3_with_thinking"},
    ),
    Case(
        "step-wise samples need the conversation format",
        {**STEP_WISE, "generator.use_conversation_multi_turn": False},
        "generator.step_wise_trajectories", "generator.use_conversation_multi_turn=true",
        {**STEP_WISE, "generator.chat_template.name_or_path": "qwen3_without_thinking"},
    ),
    Case(
        "step-wise samples have several turns, nobody knows how many",
        {"generator.step_wise_trajectories": True}, "generator.step_wise_trajectories", "no effect with generator.max_turns=1",
        {**STEP_WISE, **FOUR_GPUS, "trainer.policy_mini_batch_size": 2, "generator.n_samples_per_prompt": 3},
    ),
    Case(
        "step-wise samples have no critic",
        {**STEP_WISE, **CRITIC}, "generator.step_wise_trajectories", "does not work with trainer.critic.model.path", STEP_WISE,
    ),
    Case(
        "step-wise samples are trained from their first token on",
        {**STEP_WISE, f"{ALGORITHM}.min_filter_prefix_tokens": 4},
        "generator.step_wise_trajectories", "does not work with trainer.algorithm.min_filter_prefix_tokens", STEP_WISE,
    ),
    Case(
        "step-wise samples have one advantage",
        {**STEP_WISE, f"{ALGORITHM}.advantage_estimator": "reinforce++"},
        "generator.step_wise_trajectories", "does not work with trainer.algorithm.advantage_estimator=reinforce++",
        {**STEP_WISE, f"{ALGORITHM}.advantage_estimator": "rloo"},
    ),
]  # fmt: skip

# spec/cosmos, section 14 and the rules of its schema, where they apply here.
COSMOS = [
    Case(
        "strictly on-policy training gets weights at each step",
        {"trainer.fully_async.sync_weight_interval": 2},
        "trainer.fully_async.max_staleness_steps", "expected at least 1, because engines get weights every 2 steps",
        {"trainer.fully_async.sync_weight_interval": 2, "trainer.fully_async.max_staleness_steps": 1},
    ),
    Case(
        "rollout log-probabilities as the old policy exclude a correction between the two",
        {f"{ALGORITHM}.use_rollout_logprobs_for_loss": True, f"{CORRECTION}.tis_ratio_type": "token"},
        f"{CORRECTION}.tis_ratio_type", "leave one of them out",
        {f"{CORRECTION}.tis_ratio_type": "token"},
    ),
    Case(
        "dropped tokens belong to weights of tokens",
        {f"{CORRECTION}.token_tis_ratio_drop_high": 2.0}, f"{CORRECTION}.token_tis_ratio_drop_high", 'tis_ratio_type="token"; set it',
        {f"{CORRECTION}.token_tis_ratio_drop_high": 2.0, f"{CORRECTION}.tis_ratio_type": "token"},
    ),
    Case(
        "asynchronous tensor parallelism needs compilation",
        {"trainer.policy.async_tensor_parallel": True}, "trainer.policy.async_tensor_parallel", "needs trainer.policy.compile_model=true",
        {"trainer.policy.async_tensor_parallel": True, "trainer.policy.compile_model": True},
    ),
    Case(
        "LoRA is not compiled",
        {f"{LORA}.rank": 8, "trainer.policy.compile_model": True}, "trainer.policy.compile_model", "set it to false",
        {f"{LORA}.rank": 8},
    ),
    Case(
        "beside adapters the map only freezes",
        {f"{LORA}.rank": 8, "trainer.policy.trainable_map": {"lm_head": True}},
        "trainer.policy.trainable_map.lm_head", "trainer.policy.model.lora.modules_to_save",
        {f"{LORA}.rank": 8, "trainer.policy.trainable_map": {"lm_head": False}},
    ),
    Case(
        "S3 needs a bucket",
        {"trainer.upload.s3": "all"}, "trainer.upload.s3_bucket", "required with trainer.upload.s3",
        {"trainer.upload.s3": "all", "trainer.upload.s3_bucket": "b"},
    ),
    Case(
        "the hub needs a repository",
        {"trainer.upload.hf": True}, "trainer.upload.hf_repo_name", "required with trainer.upload.hf",
        {"trainer.upload.hf": True, "trainer.upload.hf_repo_name": "me/model"},
    ),
    Case(
        "prefetching needs workers",
        {"data.prefetch_factor": 4}, "data.prefetch_factor", "leave it out, or set both",
        {"data.prefetch_factor": 4, "data.num_workers": 1},
    ),
    Case(
        "one reset of the reference is enough",
        {f"{ALGORITHM}.reference_reset_interval": 5, "trainer.update_ref_every_epoch": True},
        "trainer.update_ref_every_epoch", "leave one of them out",
        {f"{ALGORITHM}.reference_reset_interval": 5},
    ),
    Case(
        "only a divergence in the loss has a gradient",
        {f"{ALGORITHM}.kl_importance_weighted": True, **NO_KL, f"{ALGORITHM}.use_kl_in_reward": True},
        f"{ALGORITHM}.kl_importance_weighted", "has no effect without trainer.algorithm.use_kl_loss",
        {f"{ALGORITHM}.kl_importance_weighted": True},
    ),
    Case(
        "an optimizer is only reset with the reference",
        {f"{ALGORITHM}.reset_optimizer_with_reference": False},
        f"{ALGORITHM}.reset_optimizer_with_reference", "has no effect without trainer.algorithm.reference_reset_interval",
        {f"{ALGORITHM}.reset_optimizer_with_reference": False, f"{ALGORITHM}.reference_reset_interval": 5},
    ),
    Case(
        "a reset needs a reference",
        {f"{ALGORITHM}.reference_reset_interval": 5, **NO_KL},
        f"{ALGORITHM}.reference_reset_interval", "set one of them, or leave this out",
        {f"{ALGORITHM}.reference_reset_interval": 5, **NO_KL, f"{ALGORITHM}.use_kl_in_reward": True},
    ),
    Case(
        "the constant divisor belongs to one reduction",
        {f"{ALGORITHM}.unbiased_loss_max_tokens": 99}, f"{ALGORITHM}.unbiased_loss_max_tokens", "set seq_mean_token_mean or leave it out",
        {f"{ALGORITHM}.unbiased_loss_max_tokens": 99, f"{ALGORITHM}.loss_reduction": "seq_mean_token_mean"},
    ),
    Case(
        "distillation needs a teacher",
        {f"{DISTILLATION}.enable": True}, f"{DISTILLATION}.model_path", "required with trainer.distillation.enable",
        {f"{DISTILLATION}.enable": True, f"{DISTILLATION}.model_path": "t"},
    ),
    Case(
        "the solvers of ODEs need deterministic sampling",
        {f"{DIFFUSERS}.enable": True}, f"{DIFFUSERS}.sample.deterministic_sampling", "set it to true",
        {f"{DIFFUSERS}.enable": True, f"{DIFFUSERS}.sample.solver": "flow"},
    ),
    Case(
        "one low precision at a time",
        {"trainer.policy.low_precision.fp8": True, "trainer.policy.low_precision.fp4": True},
        "trainer.policy.low_precision.fp4", "set one of them to false",
        {"trainer.policy.low_precision.fp8": True},
    ),
    Case(
        "a reward service is asked for something",
        {"environment.remote_reward.enable": True}, "environment.remote_reward.reward_function", "with their weights",
        {"environment.remote_reward.enable": True, "environment.remote_reward.reward_function": {"ocr": 1.0}},
    ),
    Case(
        "warm-up is given once",
        {f"{OPTIMIZER}.warmup_ratio": 0.1, f"{OPTIMIZER}.num_warmup_steps": 5}, f"{OPTIMIZER}.warmup_ratio", "set num_warmup_steps=0",
        {f"{OPTIMIZER}.warmup_ratio": 0.1},
    ),
    Case(
        "warm-up and decay fit into the steps",
        {f"{OPTIMIZER}.scheduler": "linear", f"{OPTIMIZER}.warmup_ratio": 0.6, f"{OPTIMIZER}.decay_ratio": 0.5},
        f"{OPTIMIZER}.decay_ratio", "lower one of them",
        {f"{OPTIMIZER}.scheduler": "linear", f"{OPTIMIZER}.warmup_ratio": 0.5, f"{OPTIMIZER}.decay_ratio": 0.5},
    ),
    Case(
        "evaluation has one source",
        {"data.test_size": 0.1}, "data.test_size", "leave one of them out",
        {"data.test_size": 0.1, "data.val_data": []},
    ),
]  # fmt: skip

OURS = [
    Case("training needs data", {"data.train_data": []}, "data.train_data", "expected at least one dataset", {}),
    Case(
        "evaluation needs data",
        {"data.val_data": []}, "trainer.eval_interval", "name a dataset there or set trainer.eval_interval=0",
        {"data.val_data": [], "trainer.eval_interval": 0},
    ),
    Case(
        "prompts set aside are a share or a number",
        {"data.test_size": 1.5, "data.val_data": []}, "data.test_size", "expected a share below 1 or a whole number of prompts",
        {"data.test_size": 2, "data.val_data": []},
    ),
    Case(
        "a seed belongs to an order",
        {"data.shuffle": False, "data.shuffle_seed": 1}, "data.shuffle_seed", "leave it out, or set data.shuffle=true",
        {"data.shuffle": True, "data.shuffle_seed": 1},
    ),
    Case(
        "prompt and answer are two columns",
        {"data.response_column": "prompt"}, "data.response_column", "expected another column than data.prompt_column",
        {"data.response_column": "answer"},
    ),
    Case(
        "sampling parameters have one place",
        {"generator.sampling_params.additional_kwargs": {"top_k": 3}},
        "generator.sampling_params.additional_kwargs.top_k", "set generator.sampling_params.top_k instead",
        {"generator.sampling_params.additional_kwargs": {"length_penalty": 1.0}},
    ),
    Case(
        "sampling parameters that are hpcrl's",
        {"generator.eval_sampling_params.additional_kwargs": {"n": 3}},
        "generator.eval_sampling_params.additional_kwargs.n", "hpcrl sets this sampling parameter itself",
        {"generator.eval_sampling_params.additional_kwargs": {"length_penalty": 1.0}},
    ),
    Case(
        "a path is for resuming from it",
        {"trainer.resume_path": "/c"}, "trainer.resume_path", 'set trainer.resume_mode="from_path" or leave it out',
        {"trainer.resume_path": "/c", "trainer.resume_mode": "from_path"},
    ),
    Case(
        "bounds of tokens come in pairs",
        {f"{CORRECTION}.token_mask_is_threshold_low": 0.5}, f"{CORRECTION}.token_mask_is_threshold_high", "set both or none",
        {f"{CORRECTION}.token_mask_is_threshold_low": 0.5, f"{CORRECTION}.token_mask_is_threshold_high": 2.0},
    ),
    Case(
        "bounds of ratios have an order",
        {f"{CORRECTION}.geo_mask_low": 1.02}, f"{CORRECTION}.geo_mask_low", "expected at most geo_mask_high (1.01), found 1.02",
        {f"{CORRECTION}.geo_mask_low": 1.01},
    ),
    Case(
        "dppo has its own importance ratio",
        {f"{CORRECTION}.tis_ratio_type": "token", f"{ALGORITHM}.policy_loss_type": "dppo"},
        f"{CORRECTION}.tis_ratio_type", "the ratio to the rollout already",
        {f"{CORRECTION}.sequence_mask_metric": "geometric", f"{ALGORITHM}.policy_loss_type": "dppo"},
    ),
    Case(
        "bounds of advantages have an order",
        {f"{ALGORITHM}.advantage_clip_low": 1.0, f"{ALGORITHM}.advantage_clip_high": -1.0},
        f"{ALGORITHM}.advantage_clip_low", "expected at most advantage_clip_high (-1.0)",
        {f"{ALGORITHM}.advantage_clip_low": -1.0, f"{ALGORITHM}.advantage_clip_high": 1.0},
    ),
    Case(
        "bounds of covariances have an order",
        {f"{ALGORITHM}.clip_cov.clip_cov_lb": 5.0}, f"{ALGORITHM}.clip_cov.clip_cov_lb", "expected less than clip_cov_ub (5.0)",
        {f"{ALGORITHM}.clip_cov.clip_cov_lb": 4.0},
    ),
    Case(
        "bounds of rewards have an order",
        {**SERVICE, "environment.remote_reward.clip_min": 6.0}, "environment.remote_reward.clip_min", "expected at most clip_max (5.0)",
        {**SERVICE, "environment.remote_reward.clip_min": 5.0},
    ),
    Case(
        "settings of a service that is not asked",
        {"environment.remote_reward.scale": 2.0}, "environment.remote_reward.scale", "has no effect without environment.remote_reward.enable",
        {**SERVICE, "environment.remote_reward.scale": 2.0},
    ),
    Case(
        "a service that pays nothing",
        {**SERVICE, "environment.remote_reward.reward_function": {"ocr": 0.0}}, "environment.remote_reward.reward_function", "every weight is 0",
        {**SERVICE, "environment.remote_reward.reward_function": {"ocr": 1.0, "taste": 0.0}},
    ),
    Case(
        "a service and named rewards",
        {**SERVICE, "environment.reward_function": {"gsm8k": 1.0}}, "environment.reward_function", "leave one of them out",
        {**SERVICE, "environment.eval_reward_function": {"gsm8k": 1.0}},
    ),
    Case(
        "a service and an environment",
        {**SERVICE, "environment.env_class": "search"}, "environment.env_class", "a service pays in its place",
        SERVICE,
    ),
    Case(
        "a metric that no function of the service reports",
        {**SERVICE, f"{ALGORITHM}.filter_reward_metric": ["taste"]},
        f"{ALGORITHM}.filter_reward_metric", '"taste" is not in environment.remote_reward.reward_function, whose rewards are ocr',
        {**SERVICE, f"{ALGORITHM}.filter_reward_metric": ["ocr"]},
    ),
    Case(
        "text2sql has databases",
        {"environment.env_class": "text2sql"}, f"{GYM}.text2sql.db_path", "required by text2sql",
        {"environment.env_class": "text2sql", f"{GYM}.text2sql.db_path": "/sql"},
    ),
    Case(
        "a judge has a name",
        {"environment.env_class": "llm_as_a_judge"}, f"{GYM}.llm_as_a_judge.model", "required by llm_as_a_judge",
        {"environment.env_class": "llm_as_a_judge", f"{GYM}.llm_as_a_judge.model": "j"},
    ),
    Case(
        "a judge has an address",
        {f"{GYM}.llm_as_a_judge.base_url": "host:8000/v1"}, f"{GYM}.llm_as_a_judge.base_url", 'found "host:8000/v1"',
        {f"{GYM}.llm_as_a_judge.base_url": "http://host:8000/v1"},
    ),
    Case(
        "a search service has an address",
        {f"{GYM}.search.search_url": "bm25:docs.jsonl"}, f"{GYM}.search.search_url", "expected an address such as",
        {f"{GYM}.search.search_url": "https://host/retrieve"},
    ),
    Case(
        "documents are searched in one place",
        {f"{GYM}.search.search_url": "http://host/retrieve", f"{GYM}.search.corpus": "/docs.jsonl"}, f"{GYM}.search.corpus", "leave one of them out",
        {f"{GYM}.search.corpus": "/docs.jsonl"},
    ),
    Case(
        "a pass of the engine holds all its sequences",
        {f"{ENGINE}.max_num_seqs": 9000}, f"{ENGINE}.max_num_batched_tokens", f"expected at least {ENGINE}.max_num_seqs (9000)",
        {f"{ENGINE}.max_num_seqs": 8192},
    ),
    Case(
        "engine options have one place",
        {f"{ENGINE}.engine_init_kwargs": {"enforce-eager": True}},
        f"{ENGINE}.engine_init_kwargs.enforce-eager", f"set {ENGINE}.enforce_eager instead",
        {f"{ENGINE}.engine_init_kwargs": {"swap-space": 1}},
    ),
    Case(
        "entries of config.json for the engine are a table",
        {f"{ENGINE}.engine_init_kwargs": {"hf_overrides": "{}"}},
        f"{ENGINE}.engine_init_kwargs.hf_overrides", "expected a table",
        {f"{ENGINE}.engine_init_kwargs": {"hf_overrides": {"a": 1}}},
    ),
    Case(
        "engine options that are hpcrl's",
        {f"{ENGINE}.engine_init_kwargs": {"port": 80}}, f"{ENGINE}.engine_init_kwargs.port", "hpcrl sets this option",
        {f"{ENGINE}.engine_init_kwargs": {"swap-space": 1}},
    ),
    Case(
        "ranks have GPUs",
        {**FOUR_GPUS, "slurm.gpus_per_node": 2}, f"{PLACEMENT}.policy_num_gpus_per_node", "but a node has 2 GPUs",
        {**FOUR_GPUS, "slurm.gpus_per_node": 4},
    ),
    Case(
        "a replica fits into a node",
        {"slurm.gpus_per_node": 2, f"{ENGINE}.tensor_parallel_size": 4}, f"{ENGINE}.tensor_parallel_size", "a replica needs 4 GPUs",
        {"slurm.gpus_per_node": 4, f"{ENGINE}.tensor_parallel_size": 4},
    ),
    Case(
        "replicas fit into a node",
        {"slurm.gpus_per_node": 4, f"{ENGINE}.tensor_parallel_size": 2, "slurm.replicas_per_node": 3},
        "slurm.replicas_per_node", "3 replicas need 6 GPUs",
        {"slurm.gpus_per_node": 4, f"{ENGINE}.tensor_parallel_size": 2, "slurm.replicas_per_node": 2},
    ),
    Case(
        "as many replicas as are the least",
        {"slurm.min_replicas": 3, f"{ENGINE}.num_engines": 2}, "slurm.min_replicas", "expected at most 2, ",
        {"slurm.min_replicas": 2, f"{ENGINE}.num_engines": 2},
    ),
    Case(
        "replicas of the run's own or elastic ones",
        {f"{ENGINE}.num_engines": 0}, f"{ENGINE}.num_engines", "or replicas of an elastic pool",
        {f"{ENGINE}.num_engines": 0, "slurm.elastic.replicas": 2, "slurm.min_replicas": 2},
    ),
    Case(
        "sbatch options of the pool have one place",
        {"slurm.elastic.extra": {"mem": "4G"}}, "slurm.elastic.extra.mem", "set slurm.elastic.mem_gb instead",
        {"slurm.elastic.extra": {"exclusive": True}},
    ),
    Case(
        "sbatch options of the pool that are hpcrl's",
        {"slurm.elastic.extra": {"gpus-per-node": 1}}, "slurm.elastic.extra.gpus-per-node", "hpcrl sets this option of sbatch itself",
        {"slurm.elastic.extra": {"reservation": "x"}},
    ),
    Case(
        "FlashInfer needs GPUs",
        {f"{ENGINE}.use_flashinfer": True}, f"{ENGINE}.use_flashinfer", "set it to false",
        {f"{ENGINE}.use_flashinfer": True, "slurm.gpus_per_node": 1},
    ),
    Case(
        "a run that is told to leave has done something before",
        {"slurm.signal_seconds": 200, "slurm.time_minutes": 5}, "slurm.signal_seconds", "at most half of slurm.time_minutes (150 s), found 200",
        {"slurm.signal_seconds": 200, "slurm.time_minutes": 10},
    ),
    Case(
        "sbatch options have one place",
        {"slurm.extra": {"cpus-per-task": 4}}, "slurm.extra.cpus-per-task", "set slurm.cpus_per_task instead",
        {"slurm.extra": {"licenses": "x"}},
    ),
    Case(
        "sbatch options that are hpcrl's",
        {"slurm.extra": {"array": "0-3"}}, "slurm.extra.array", "hpcrl sets this option of sbatch itself",
        {"slurm.extra": {"licenses": "x"}},
    ),
    Case(
        "rewards are known",
        {"environment.reward_function": {"boxed_meth": 1.0}}, "environment.reward_function", 'found "boxed_meth"; did you mean boxed_math?',
        {"environment.reward_function": {"boxed_math": 1.0, "format": 0.0, "mine.rewards:taste": -0.5}},
    ),
    Case(
        "rewards of evaluation are known",
        {"environment.eval_reward_function": {"chess": 1.0}}, "environment.eval_reward_function", "expected names of single_choice, ",
        {"environment.eval_reward_function": {"gsm8k": 1.0}},
    ),
    Case(
        "a reward counts",
        {"environment.reward_function": {"gsm8k": 0.0, "format": 0.0}}, "environment.reward_function", "every weight is 0",
        {"environment.reward_function": {"gsm8k": 1.0, "format": 0.0}},
    ),
    Case(
        "what filters is among the rewards",
        {"environment.reward_function": {"gsm8k": 1.0}, f"{ALGORITHM}.filter_reward_metric": ["format"]},
        f"{ALGORITHM}.filter_reward_metric", '"format" is not in environment.reward_function, whose rewards are gsm8k',
        {"environment.reward_function": {"gsm8k": 1.0, "format": 0.0}, f"{ALGORITHM}.filter_reward_metric": ["format"]},
    ),
    Case(
        "an environment or rewards pay",
        {"environment.reward_function": {"gsm8k": 1.0}, "environment.env_class": "mine.envs:Mine"},
        "environment.env_class", "so that mine.envs:Mine has no effect",
        {"environment.eval_reward_function": {"gsm8k": 1.0}, "environment.env_class": "mine.envs:Mine"},
    ),
    Case(
        "the overlong penalty is listed",
        {"environment.overlong_reward.penalty_factor": 0.5}, "environment.overlong_reward.penalty_factor", "list it there",
        {
            "environment.overlong_reward": {"penalty_factor": 0.5, "buffer_length": 1024},
            "environment.reward_function": {"gsm8k": 1.0, "overlong": 1.0},
        },
    ),
    Case(
        "the buffer of the overlong penalty is within the longest response",
        {"environment.reward_function": {"overlong": 1.0}}, "environment.overlong_reward.buffer_length",
        "expected at most the longest response (generator.sampling_params.max_generate_length = 1024), found 4096",
        {"environment.reward_function": {"overlong": 1.0}, "generator.sampling_params.max_generate_length": 4096},
    ),
    Case(
        "the buffer of the overlong penalty is within the longest response of evaluation",
        {
            "environment.eval_reward_function": {"overlong": 1.0}, "environment.overlong_reward.buffer_length": 512,
            "generator.eval_sampling_params.max_generate_length": 300,
        },
        "environment.overlong_reward.buffer_length", "generator.eval_sampling_params.max_generate_length = 300",
        {"environment.eval_reward_function": {"overlong": 1.0}, "environment.overlong_reward.buffer_length": 512},
    ),
]  # fmt: skip

MODULES = (rules, ranks, layouts, generation, scoring, site, strategy, training)
CASES = [*SKYRL, *COSMOS, *OURS]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_a_rule_refuses_what_cannot_work_and_only_that(case: Case) -> None:
    told = [problem for problem in found(case.wrong) if problem.path == case.path]
    assert any(case.words in problem.message for problem in told), found(case.wrong)
    assert found(case.right) == []


def test_a_single_mistake_is_one_problem() -> None:
    for case in CASES:
        assert len(found(case.wrong)) == 1, (case.rule, found(case.wrong))


def test_defaults_are_possible() -> None:
    assert found({}) == []


def test_problems_of_several_rules_are_told_at_once() -> None:
    settings = {
        "data.train_data": [],
        "trainer.resume_mode": "from_path",
        f"{ALGORITHM}.advantage_estimator": "gae",
        f"{ENGINE}.num_engines": 2,
        **COLOCATED,
    }
    assert {problem.path for problem in found(settings)} == {
        "data.train_data",
        "trainer.resume_path",
        "trainer.critic.model.path",
        f"{PLACEMENT}.colocate_all",
    }


def test_values_out_of_range_do_not_hide_rules_that_need_no_arithmetic() -> None:
    settings = {
        "trainer.epochs": 0,
        "trainer.policy_mini_batch_size": 0,
        "trainer.max_ckpts_to_keep": 0,
        "data.train_data": [],
    }
    assert {problem.path for problem in found(settings)} == set(settings)


@pytest.mark.parametrize("value", [0, -1])
def test_no_rule_stumbles_over_a_value_out_of_range(value: int) -> None:
    """Every whole number at a value that may divide, multiply or count: problems, never a ZeroDivisionError."""
    numbers = [setting.path for setting in leaves(Config) if int in setting.types]
    for path in numbers:
        found({**CRITIC, **COLOCATED, path: value})
    assert len(found(dict.fromkeys(numbers, value))) > 50


def test_no_rule_that_can_be_violated_goes_untested() -> None:
    """Every `yield Problem(…)` of the modules of rules is reached by a case."""
    reached: set[tuple[str, int]] = set()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename in files:
            if event == "line":
                reached.add((frame.f_code.co_filename, frame.f_lineno))
            return trace
        return None

    files = {inspect.getsourcefile(module) for module in MODULES}
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for wrong in [*(case.wrong for case in CASES), *(case[0] for case in [*TRAINER, *LAYOUTS])]:
            found(wrong)
    finally:
        sys.settrace(before)
    untold = [
        f"{module.__name__}: {ast.unparse(node)}"
        for module in MODULES
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Yield) and (inspect.getsourcefile(module), node.lineno) not in reached
    ]
    assert not untold
