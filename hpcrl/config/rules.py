"""Combinations of settings that cannot work. Each rule is one small function; all of them are told at once."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from typing import TYPE_CHECKING

from hpcrl.config.algorithm import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from hpcrl.config.derive import max_input_length, model_parallel_size, ref_ranks, trainer_ranks
from hpcrl.config.problem import Problem
from hpcrl.config.ranges import out_of_range
from hpcrl.config.site import engine_options, gpus_of_nodes, sbatch_options
from hpcrl.config.status import waiting

if TYPE_CHECKING:
    from hpcrl.config.root import Config

Rule = Callable[["Config"], Iterator[Problem]]

_IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_TEMPLATES = ("qwen3_with_thinking", "qwen3_without_thinking")


def check(config: Config) -> list[Problem]:
    """Return everything that cannot work, and everything that cannot work yet, in a configuration of the right types."""
    return [*impossible(config), *waiting(config)]


def impossible(config: Config) -> list[Problem]:
    """Return everything that cannot work, whatever is still to be built."""
    problems = list(out_of_range(config))
    if not problems:  # the rules calculate with the numbers
        problems += [problem for rule in RULES for problem in rule(config)]
    return problems


def _named_functions(config: Config) -> Iterator[Problem]:
    algorithm = config.trainer.algorithm
    for name, known in (("advantage_estimator", ADVANTAGE_ESTIMATORS), ("policy_loss_type", POLICY_LOSSES)):
        value = getattr(algorithm, name)
        if value not in known and not _IMPORT_PATH.fullmatch(value):
            near = get_close_matches(value, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            yield Problem(
                f"trainer.algorithm.{name}",
                f'expected one of {", ".join(known)}, or your own as "package.module:function", found "{value}"{hint}',
            )


def _datasets(config: Config) -> Iterator[Problem]:
    data = config.data
    if not data.train_data:
        yield Problem("data.train_data", "expected at least one dataset, found an empty list")
    if config.trainer.eval_interval > 0 and not data.val_data and data.test_size is None:
        yield Problem(
            "trainer.eval_interval",
            f"{config.trainer.eval_interval} asks for evaluation, but data.val_data is empty; name a dataset there or set trainer.eval_interval=0",
        )
    if data.test_size is not None and data.val_data:
        yield Problem("data.test_size", "has no effect with data.val_data; leave one of them out")
    if data.prefetch_factor is not None and not data.num_workers:
        yield Problem("data.prefetch_factor", "has no effect without data.num_workers; leave it out, or set both")


def _whole_mini_batches(config: Config) -> Iterator[Problem]:
    trainer = config.trainer
    minis = {"policy_mini_batch_size": trainer.policy_mini_batch_size}
    if trainer.critic.model.path is not None:
        minis["critic_mini_batch_size"] = trainer.critic_mini_batch_size
    for name, mini in minis.items():
        if trainer.train_batch_size % mini:
            yield Problem(
                "trainer.train_batch_size",
                f"expected a multiple of trainer.{name} ({mini}), found {trainer.train_batch_size}",
            )


def _parallel_sizes(config: Config) -> Iterator[Problem]:
    trainer = config.trainer
    if trainer_ranks(trainer) % model_parallel_size(trainer):
        sizes = (
            "trainer.policy.megatron_config"
            if trainer.strategy == "megatron"
            else "trainer.policy.sequence_parallel_size"
        )
        yield Problem(
            sizes,
            f"{model_parallel_size(trainer)} ranks share each sample, which does not divide the {trainer_ranks(trainer)} "
            "trainer ranks (trainer.placement)",
        )


def _equal_shares(config: Config) -> Iterator[Problem]:
    trainer, samples = config.trainer, config.generator.n_samples_per_prompt
    shares = max(1, trainer_ranks(trainer) // model_parallel_size(trainer))
    minis = {"policy_mini_batch_size": trainer.policy_mini_batch_size}
    if trainer.critic.model.path is not None:
        minis["critic_mini_batch_size"] = trainer.critic_mini_batch_size
    for name, mini in minis.items():
        if mini * samples % shares:
            yield Problem(
                f"trainer.{name}",
                f"{mini} prompts x {samples} samples (generator.n_samples_per_prompt) cannot be shared equally by {shares} "
                "trainer ranks (trainer.placement); make the product a multiple of the ranks",
            )


def _reference_shares(config: Config) -> Iterator[Problem]:
    trainer, samples = config.trainer, config.generator.n_samples_per_prompt
    algorithm, shares = trainer.algorithm, ref_ranks(trainer)
    least = math.lcm(max(1, trainer_ranks(trainer) // model_parallel_size(trainer)), shares)
    if (algorithm.use_kl_loss or algorithm.use_kl_in_reward) and trainer.train_batch_size * samples < least:
        yield Problem(
            "trainer.train_batch_size",
            f"{trainer.train_batch_size} prompts x {samples} samples are fewer than {least}, the least that policy and reference ranks can share",
        )


def _own_reference_nodes(config: Config) -> Iterator[Problem]:
    placement = config.trainer.placement
    for name in ("num_nodes", "num_gpus_per_node"):
        own, policy = getattr(placement, f"ref_{name}"), getattr(placement, f"policy_{name}")
        if placement.colocate_policy_ref and own not in (None, policy):
            yield Problem(
                f"trainer.placement.ref_{name}",
                f"{own} differs from the policy's {policy}, whose GPUs the reference shares; leave it out or set trainer.placement.colocate_policy_ref=false",
            )


def _colocation(config: Config) -> Iterator[Problem]:
    engine = config.generator.inference_engine
    if not config.trainer.placement.colocate_all:
        return
    engines = (
        engine.num_engines
        * engine.tensor_parallel_size
        * engine.pipeline_parallel_size
        * engine.data_parallel_size
    )
    if engines != trainer_ranks(config.trainer):
        yield Problem(
            "trainer.placement.colocate_all",
            f"the engines use {engines} GPUs (num_engines x tensor, pipeline and data parallel size), the trainer {trainer_ranks(config.trainer)}; "
            "make them equal",
        )
    if config.trainer.fully_async.max_staleness_steps:
        yield Problem(
            "trainer.placement.colocate_all",
            "trainer and engines take turns on their GPUs, so trainer.fully_async.max_staleness_steps must be 0",
        )


def _strategy(config: Config) -> Iterator[Problem]:
    trainer = config.trainer
    if trainer.strategy == "fsdp":
        for name in ("policy", "critic"):
            if getattr(trainer, name).fsdp_config.cpu_offload:
                yield Problem(
                    f"trainer.{name}.fsdp_config.cpu_offload",
                    "FSDP1 cannot train offloaded parameters; use trainer.strategy=fsdp2",
                )
    if trainer.strategy != "megatron":
        return
    megatron = trainer.policy.megatron_config
    if trainer.critic.model.path is not None:
        yield Problem("trainer.critic.model.path", "a critic needs trainer.strategy=fsdp2")
    for name in ("policy", "ref"):
        if getattr(trainer, name).sequence_parallel_size != 1:
            yield Problem(
                f"trainer.{name}.sequence_parallel_size",
                f"expected 1 with Megatron; set trainer.{name}.megatron_config.context_parallel_size instead",
            )
    if megatron.context_parallel_size > 1 and not trainer.use_sample_packing:
        yield Problem("trainer.use_sample_packing", "context parallelism needs it; set it to true")


def _compilation(config: Config) -> Iterator[Problem]:
    policy = config.trainer.policy
    if policy.async_tensor_parallel and not policy.compile_model:
        yield Problem("trainer.policy.async_tensor_parallel", "needs trainer.policy.compile_model=true")
    if policy.model.lora.rank and policy.compile_model:
        yield Problem("trainer.policy.compile_model", "does not work with LoRA; set it to false")


def _warm_up(config: Config) -> Iterator[Problem]:
    for name in ("policy", "critic"):
        optimizer = getattr(config.trainer, name).optimizer_config
        path = f"trainer.{name}.optimizer_config"
        if optimizer.warmup_ratio is not None and optimizer.num_warmup_steps:
            yield Problem(f"{path}.warmup_ratio", f"given beside {path}.num_warmup_steps; leave one of them out")
        if (optimizer.warmup_ratio or 0) + (optimizer.decay_ratio or 0) > 1:
            yield Problem(f"{path}.decay_ratio", f"with {path}.warmup_ratio more than all steps; lower one of them")


def _critic(config: Config) -> Iterator[Problem]:
    if config.trainer.algorithm.advantage_estimator == "gae" and config.trainer.critic.model.path is None:
        yield Problem(
            "trainer.critic.model.path", "required with trainer.algorithm.advantage_estimator=gae: a model to start from"
        )


def _reference(config: Config) -> Iterator[Problem]:
    algorithm = config.trainer.algorithm
    if algorithm.use_kl_loss and algorithm.use_kl_in_reward:
        yield Problem(
            "trainer.algorithm.use_kl_in_reward",
            "the KL divergence counts in the loss or in the reward, not in both; set trainer.algorithm.use_kl_loss=false",
        )
    resets = algorithm.reference_reset_interval is not None
    if (resets or config.trainer.update_ref_every_epoch) and not (algorithm.use_kl_loss or algorithm.use_kl_in_reward):
        name = "trainer.algorithm.reference_reset_interval" if resets else "trainer.update_ref_every_epoch"
        yield Problem(name, "there is no reference model without trainer.algorithm.use_kl_loss or use_kl_in_reward")
    if resets and config.trainer.update_ref_every_epoch:
        yield Problem(
            "trainer.update_ref_every_epoch",
            "given beside trainer.algorithm.reference_reset_interval; leave one of them out",
        )


def _off_policy(config: Config) -> Iterator[Problem]:
    path, algorithm = "trainer.algorithm.off_policy_correction", config.trainer.algorithm
    correction = algorithm.off_policy_correction
    low, high = correction.token_mask_is_threshold_low, correction.token_mask_is_threshold_high
    if (low is None) != (high is None):
        missing = "low" if low is None else "high"
        yield Problem(f"{path}.token_mask_is_threshold_{missing}", "required with the other bound")
    for name in ("geo_mask", "product_mask", "outlier_token_is_threshold", "token_mask_is_threshold"):
        low, high = getattr(correction, f"{name}_low"), getattr(correction, f"{name}_high")
        if low is not None and high is not None and low > high:
            yield Problem(f"{path}.{name}_low", f"{low} is above {name}_high ({high})")
    enabled = [name for name, value in vars(correction).items() if name in _CORRECTIONS and value is not None]
    if enabled and algorithm.use_rollout_logprobs_for_loss:
        yield Problem(
            f"{path}.{enabled[0]}",
            "has no effect with trainer.algorithm.use_rollout_logprobs_for_loss, where old and rollout log-probabilities are the same",
        )


_CORRECTIONS = {
    "tis_ratio_type",
    "token_tis_ratio_drop_high",
    "sequence_mask_metric",
    "outlier_token_is_threshold_low",
    "outlier_token_is_threshold_high",
    "token_mask_is_threshold_low",
    "token_mask_is_threshold_high",
}


def _bounds(config: Config) -> Iterator[Problem]:
    algorithm = config.trainer.algorithm
    low, high = algorithm.advantage_clip_low, algorithm.advantage_clip_high
    if low is not None and high is not None and low > high:
        yield Problem("trainer.algorithm.advantage_clip_low", f"{low} is above advantage_clip_high ({high})")
    if algorithm.clip_cov.clip_cov_lb >= algorithm.clip_cov.clip_cov_ub:
        yield Problem("trainer.algorithm.clip_cov.clip_cov_lb", "expected less than clip_cov_ub")
    if algorithm.unbiased_loss_max_tokens is not None and algorithm.loss_reduction != "seq_mean_token_mean":
        yield Problem(
            "trainer.algorithm.unbiased_loss_max_tokens",
            f"has no effect with loss_reduction={algorithm.loss_reduction}; set seq_mean_token_mean or leave it out",
        )
    if config.environment.remote_reward.clip_min > config.environment.remote_reward.clip_max:
        yield Problem("environment.remote_reward.clip_min", "expected at most clip_max")


def _staleness(config: Config) -> Iterator[Problem]:
    fully_async, batch = config.trainer.fully_async, config.trainer.train_batch_size
    path, stale = "trainer.fully_async", fully_async.max_staleness_steps
    if fully_async.sync_weight_interval - 1 > stale:
        yield Problem(
            f"{path}.max_staleness_steps",
            f"expected at least {fully_async.sync_weight_interval - 1}, because engines get weights every "
            f"{fully_async.sync_weight_interval} steps ({path}.sync_weight_interval), found {stale}",
        )
    groups = fully_async.num_parallel_generation_workers
    if groups is not None and not batch <= groups <= batch * (stale + 1):
        yield Problem(
            f"{path}.num_parallel_generation_workers",
            f"expected from {batch} (trainer.train_batch_size) to {batch * (stale + 1)} (times max_staleness_steps + 1), found {groups}",
        )


def _checkpoints(config: Config) -> Iterator[Problem]:
    trainer = config.trainer
    if trainer.max_ckpts_to_keep == 0:
        yield Problem(
            "trainer.max_ckpts_to_keep",
            "0 would delete every checkpoint; expected -1 (keep all) or at least 1; trainer.ckpt_interval=0 writes none",
        )
    if trainer.resume_mode == "from_path" and trainer.resume_path is None:
        yield Problem("trainer.resume_path", 'required with trainer.resume_mode="from_path": a checkpoint directory')
    if trainer.resume_mode != "from_path" and trainer.resume_path is not None:
        yield Problem(
            "trainer.resume_path",
            f'has no effect with trainer.resume_mode="{trainer.resume_mode}"; set trainer.resume_mode="from_path" or leave it out',
        )
    if trainer.upload.s3 is not None and trainer.upload.s3_bucket is None:
        yield Problem("trainer.upload.s3_bucket", "required with trainer.upload.s3")
    if trainer.upload.hf and trainer.upload.hf_repo_name is None:
        yield Problem("trainer.upload.hf_repo_name", "required with trainer.upload.hf")


def _lengths(config: Config) -> Iterator[Problem]:
    longest, prompt = max_input_length(config.generator, config.trainer), config.trainer.max_prompt_length
    if config.generator.max_turns == 1 and longest != prompt:
        yield Problem(
            "generator.max_input_length",
            f"expected trainer.max_prompt_length ({prompt}) where generator.max_turns=1, found {longest}; leave it out",
        )
    elif longest < prompt:
        yield Problem(
            "generator.max_input_length",
            f"expected at least trainer.max_prompt_length ({prompt}), found {longest}",
        )


def _chat(config: Config) -> Iterator[Problem]:
    generator, template = config.generator, config.generator.chat_template
    if template.source == "file" and not template.name_or_path:
        yield Problem("generator.chat_template.name_or_path", 'required with source="file": a Jinja file')
    if template.source == "name" and template.name_or_path and template.name_or_path not in _TEMPLATES:
        yield Problem(
            "generator.chat_template.name_or_path",
            f'expected one of {", ".join(_TEMPLATES)}, or source="file", found "{template.name_or_path}"',
        )
    if not generator.step_wise_trajectories:
        return
    if template.name_or_path or not generator.use_conversation_multi_turn:
        yield Problem(
            "generator.step_wise_trajectories",
            "needs the tokenizer's own chat template and generator.use_conversation_multi_turn=true",
        )
    if config.trainer.algorithm.advantage_estimator in ("gae", "reinforce++"):
        yield Problem(
            "generator.step_wise_trajectories",
            f"does not work with trainer.algorithm.advantage_estimator={config.trainer.algorithm.advantage_estimator}, which needs the whole sample",
        )


def _experts(config: Config) -> Iterator[Problem]:
    engine = config.generator.inference_engine
    together = engine.data_parallel_size * engine.tensor_parallel_size
    if engine.expert_parallel_size not in (1, together):
        yield Problem(
            "generator.inference_engine.expert_parallel_size",
            f"expected 1 or data_parallel_size x tensor_parallel_size ({together}), found {engine.expert_parallel_size}",
        )


def _teacher(config: Config) -> Iterator[Problem]:
    distillation = config.trainer.distillation
    if distillation.enable and distillation.model_path is None:
        yield Problem("trainer.distillation.model_path", "required with trainer.distillation.enable: the teacher")


def _diffusion(config: Config) -> Iterator[Problem]:
    sample = config.trainer.policy.diffusers.sample
    if config.trainer.policy.diffusers.enable and sample.solver in ("dpm1", "dpm2") and not sample.deterministic_sampling:
        yield Problem(
            "trainer.policy.diffusers.sample.deterministic_sampling", f"{sample.solver} needs it; set it to true"
        )


RULES: tuple[Rule, ...] = (
    _named_functions,
    _datasets,
    _whole_mini_batches,
    _parallel_sizes,
    _equal_shares,
    _reference_shares,
    _own_reference_nodes,
    _colocation,
    _strategy,
    _compilation,
    _warm_up,
    _critic,
    _reference,
    _off_policy,
    _bounds,
    _staleness,
    _checkpoints,
    _lengths,
    _chat,
    _experts,
    _teacher,
    _diffusion,
    engine_options,
    gpus_of_nodes,
    sbatch_options,
)
