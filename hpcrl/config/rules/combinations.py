"""Rules about combinations of settings, one small function each; all are reported at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hpcrl.config.backend import unknown_backends
from hpcrl.config.errors import Problem
from hpcrl.config.family import families
from hpcrl.config.fields import Setting, values
from hpcrl.config.import_path import misnamed
from hpcrl.config.layouts import problems_of_all
from hpcrl.config.rules.agents import agents, endpoint, robots, rows_of_samples
from hpcrl.config.rules.alerts import alerts
from hpcrl.config.rules.cluster import (
    container,
    copies_of_weights,
    counted_gpus,
    engine_of_family,
    engine_options,
    enough_replicas,
    eval_replicas,
    evaluation_job,
    gpus_of_nodes,
    requests,
    rules_of_backends,
    sandboxes,
    sbatch_options,
    settings_of_engines,
    shared_secrets,
    time_to_save,
    ways_of_weights,
)
from hpcrl.config.rules.determinism import one_set_of_bits
from hpcrl.config.rules.generation import (
    best_of_samples,
    chat,
    datasets,
    dynamic_sampling,
    learned_observations,
    lengths,
    sampled_distribution,
    sampling_parameters,
    several_turns,
    step_wise,
)
from hpcrl.config.rules.lending import lent_gpus
from hpcrl.config.rules.megatron_layouts import expert_sizes, pipeline, reference_layout
from hpcrl.config.rules.ranks import (
    colocated_engines,
    critic_apart,
    enough_samples,
    equal_shares,
    parallel_sizes,
    shared_gpus,
    shared_tokens,
    whole_mini_batches,
)
from hpcrl.config.rules.rewards import (
    environments,
    filter_metrics,
    group_rewards,
    judges,
    one_reward_source,
    overlong,
    remote_reward,
    reward_names,
    scoring_reward_model,
    several_rewards,
)
from hpcrl.config.rules.scorers import (
    enough_scorers,
    own_teacher,
    ranks_of_scorers,
    reference_apart,
    teacher,
    tokens_of_the_policy,
)
from hpcrl.config.rules.single_values import out_of_range, unimplemented_values
from hpcrl.config.rules.training import (
    adapted_experts,
    estimated_old_logprobs,
    frozen,
    kernels,
    low_precision,
    moments,
    muon,
    parameter_groups,
    preference_losses,
    profiles,
    recomputation,
    reward_models,
    rotary_positions,
    routers,
    schedule_free,
    sharding,
    shared_prefixes,
    units,
    without_effect,
)
from hpcrl.config.rules.unused_settings import not_switched_on
from hpcrl.config.rules.uploads import uploads
from hpcrl.config.sections.functions import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from hpcrl.config.sections.trainer import LOGGERS, TrainerConfig
from hpcrl.config.sections.tree import ConfigTree

Rule = Callable[[ConfigTree], Iterator[Problem]]

_COUNTED = re.compile(
    r"(_size|_nodes|_per_node|_per_prompt|_engines|_steps|\.reshard_after_forward|\.oversampling_ratio)$"
)


def check(config: ConfigTree) -> list[Problem]:
    """Return everything that cannot work, and everything that cannot work yet, in a configuration of the right types.

    Of one with ranges, in its largest layout, and only where no layout works.
    """
    return problems_of_all(config, check_layout)


def check_layout(config: ConfigTree) -> list[Problem]:
    """Return the problems of a configuration without ranges, as `check`."""
    waiting = list(unimplemented_values(values(config)))
    paths = {problem.path for problem in waiting}  # what else is wrong with them is of no use yet
    return [*(problem for problem in impossible(config) if problem.path not in paths), *waiting]


def alone(given: Iterable[tuple[Setting, Any]]) -> list[Problem]:
    """Return problems of single values of the right types."""
    found = list(given)
    return [*out_of_range(found), *unimplemented_values(found)]


def impossible(config: ConfigTree) -> list[Problem]:
    """Return everything that cannot work, whatever is still to be built."""
    problems = list(out_of_range(values(config)))
    if unknown := list(unknown_backends(config)):  # rules ask the engine
        return problems + unknown
    wrong = {problem.path for problem in problems}
    rules = [rule for family in families() for rule in family.rules]
    rules += [rule for rule in RULES if rule not in _CALCULATING] if any(map(_COUNTED.search, wrong)) else RULES
    found = [problem for rule in rules for problem in _violations(rule, config, excused=bool(wrong))]
    return problems + [problem for problem in found if problem.path not in wrong]


def _violations(rule: Rule, config: ConfigTree, *, excused: bool) -> list[Problem]:
    """Return the problems that a rule finds; where a value out of range is reported, none if it divides by 0."""
    try:
        return list(rule(config))
    except ZeroDivisionError:
        if excused:
            return []
        raise


def _named_functions(config: ConfigTree) -> Iterator[Problem]:
    algorithm = config.trainer.algorithm
    for name, known in (("advantage_estimator", ADVANTAGE_ESTIMATORS), ("policy_loss_type", POLICY_LOSSES)):
        yield from misnamed(f"trainer.algorithm.{name}", getattr(algorithm, name), known, "one of")


def _loggers(config: ConfigTree) -> Iterator[Problem]:
    logger = config.trainer.logger
    for name in [logger] if isinstance(logger, str) else logger:
        yield from misnamed("trainer.logger", name, LOGGERS, "some of")


def _lora(config: ConfigTree) -> Iterator[Problem]:
    trainer, policy = config.trainer, config.trainer.policy
    for role, lora in trainer.adapters.items():
        path = f"trainer.{role}.model.lora"
        if lora.init_method == "zero":
            yield Problem(
                f"{path}.init_method",
                "both matrices of each adapter would be 0, and no gradient would reach either; use kaiming",
            )
        if lora.init_method == "eva":
            yield Problem(
                f"{path}.init_method",
                "adapters are made when a run starts, and EVA needs the model's activations on data that engines have yet to generate; "
                "use pissa or olora, which need the weights alone",
            )
        if lora.target_parameters and lora.dropout:
            yield Problem(
                f"{path}.dropout",
                f"adapters of experts are added to their weights, which has no inputs to drop; set it to 0, or leave {path}.target_parameters out",
            )
        sizes = policy.megatron_config
        if lora.target_parameters and trainer.strategy == "megatron":
            tensor, own = sizes.tensor_model_parallel_size, sizes.expert_tensor_parallel_size
            if own not in (None, 1, tensor):
                yield Problem(
                    "trainer.policy.megatron_config.expert_tensor_parallel_size",
                    f"expected 1 or tensor_model_parallel_size = {tensor} with {path}.target_parameters, found {own}",
                )
        if lora.modules_to_save and lora.adapter_path is not None:
            yield Problem(
                f"{path}.modules_to_save",
                f"a run that begins with given adapters trains adapters alone; leave it or {path}.adapter_path out",
            )
    if policy.model.lora.rank and trainer.reference_follows:
        yield from _moving_reference(trainer)
    trained = [name for name, whether in policy.trainable_map.items() if whether]
    if policy.model.lora.rank and trained:
        yield Problem(
            f"trainer.policy.trainable_map.{trained[0]}",
            "with LoRA, what is trained beside the adapters is named in trainer.policy.model.lora.modules_to_save; leave it out here",
        )


def _moving_reference(trainer: TrainerConfig) -> Iterator[Problem]:
    setting = "update_ref_every_epoch" if trainer.update_ref_every_epoch else "algorithm.reference_reset_interval"
    if not trainer.reference_is_base:
        yield Problem(
            f"trainer.{setting}",
            "with LoRA the reference is the policy's model with other adapters; leave out the model, rope settings and number type of "
            "trainer.ref, or leave this out",
        )


def _warm_up(config: ConfigTree) -> Iterator[Problem]:
    for name in ("policy", "critic"):
        optimizer = getattr(config.trainer, name).optimizer_config
        path = f"trainer.{name}.optimizer_config"
        if optimizer.warmup_ratio is not None and optimizer.num_warmup_steps:
            yield Problem(
                f"{path}.warmup_ratio", f"given beside {path}.num_warmup_steps; leave it out, or set num_warmup_steps=0"
            )
        if (optimizer.warmup_ratio or 0) + (optimizer.decay_ratio or 0) > 1:
            yield Problem(f"{path}.decay_ratio", f"with {path}.warmup_ratio more than all steps; lower one of them")


def _critic(config: ConfigTree) -> Iterator[Problem]:
    if config.trainer.algorithm.advantage_estimator == "gae" and config.trainer.critic.model.path is None:
        yield Problem(
            "trainer.critic.model.path",
            "required with trainer.algorithm.advantage_estimator=gae: a model to start from",
        )
    if not config.trainer.algorithm.value_head_prefix.isidentifier():
        yield Problem(
            "trainer.algorithm.value_head_prefix",
            f'expected a name of letters, digits and underscores, found "{config.trainer.algorithm.value_head_prefix}"',
        )


def _reference(config: ConfigTree) -> Iterator[Problem]:
    algorithm = config.trainer.algorithm
    if algorithm.use_kl_in_reward and algorithm.policy_loss_type == "cross_entropy":
        yield Problem(
            "trainer.algorithm.use_kl_in_reward",
            'has no effect with trainer.algorithm.policy_loss_type="cross_entropy", which has no advantages; set use_kl_loss=true instead',
        )
    if algorithm.use_kl_loss and algorithm.use_kl_in_reward:
        yield Problem(
            "trainer.algorithm.use_kl_in_reward",
            "the KL divergence counts in the loss or in the reward, not in both; set trainer.algorithm.use_kl_loss=false",
        )
    penalized = algorithm.use_kl_in_reward and algorithm.kl_estimator_type == "k1" and algorithm.kl_ctrl.type == "fixed"
    if algorithm.advantage_estimator == "online_dpo" and not (penalized and algorithm.kl_loss_coef):
        yield Problem(
            "trainer.algorithm.advantage_estimator",
            "online_dpo compares samples by their log-ratios to the reference; set trainer.algorithm.use_kl_in_reward=true, "
            'kl_estimator_type="k1" and kl_ctrl.type="fixed", with a kl_loss_coef above 0',
        )
    resets = algorithm.reference_reset_interval is not None
    if (resets or config.trainer.update_ref_every_epoch) and not config.trainer.uses_reference:
        name = "trainer.algorithm.reference_reset_interval" if resets else "trainer.update_ref_every_epoch"
        needs = {
            "rl": "without trainer.algorithm.use_kl_loss or use_kl_in_reward; set one of them",
            "dpo": "with trainer.dpo.reference_free, or with simpo and orpo alone; choose another trainer.dpo.loss_type",
        }
        without = needs.get(config.trainer.mode, f'with trainer.mode="{config.trainer.mode}"; choose another one')
        yield Problem(name, f"there is no reference model {without}, or leave this out")
    if resets and config.trainer.update_ref_every_epoch:
        yield Problem(
            "trainer.update_ref_every_epoch",
            "given beside trainer.algorithm.reference_reset_interval; leave one of them out",
        )


def _off_policy(config: ConfigTree) -> Iterator[Problem]:
    path, algorithm = "trainer.algorithm.off_policy_correction", config.trainer.algorithm
    correction = algorithm.off_policy_correction
    low, high = correction.token_mask_is_threshold_low, correction.token_mask_is_threshold_high
    if (low is None) != (high is None):
        missing = "low" if low is None else "high"
        yield Problem(f"{path}.token_mask_is_threshold_{missing}", "required with the other bound; set both or none")
    for name in ("geo_mask", "product_mask", "outlier_token_is_threshold", "token_mask_is_threshold"):
        low, high = getattr(correction, f"{name}_low"), getattr(correction, f"{name}_high")
        if low is not None and high is not None and low > high:
            yield Problem(f"{path}.{name}_low", f"expected at most {name}_high ({high}), found {low}")
    if correction.tis_ratio_type is not None and algorithm.policy_loss_type in ("dppo", "vespo", "m2po", "ipa"):
        yield Problem(
            f"{path}.tis_ratio_type",
            f"the loss {algorithm.policy_loss_type} has the ratio to the rollout already, which would count twice; leave it out",
        )
    enabled = [name for name, value in vars(correction).items() if name in _CORRECTIONS and value is not None]
    if enabled and algorithm.use_rollout_logprobs_for_loss:
        yield Problem(
            f"{path}.{enabled[0]}",
            "has no effect with trainer.algorithm.use_rollout_logprobs_for_loss, where old and rollout log-probabilities are the "
            "same; leave one of them out",
        )


_CORRECTIONS = {
    "tis_ratio_type",
    "token_tis_ratio_drop_high",
    "sequence_mask_metric",
    "outlier_token_is_threshold_low",
    "outlier_token_is_threshold_high",
    "token_mask_is_threshold_low",
    "token_mask_is_threshold_high",
    "token_mask_kl_threshold",
}


def _bounds(config: ConfigTree) -> Iterator[Problem]:
    algorithm = config.trainer.algorithm
    low, high = algorithm.advantage_clip_low, algorithm.advantage_clip_high
    if low is not None and high is not None and low > high:
        yield Problem(
            "trainer.algorithm.advantage_clip_low", f"expected at most advantage_clip_high ({high}), found {low}"
        )
    if algorithm.clip_cov.clip_cov_lb >= algorithm.clip_cov.clip_cov_ub:
        low, high = algorithm.clip_cov.clip_cov_lb, algorithm.clip_cov.clip_cov_ub
        yield Problem("trainer.algorithm.clip_cov.clip_cov_lb", f"expected less than clip_cov_ub ({high}), found {low}")


def _staleness(config: ConfigTree) -> Iterator[Problem]:
    fully_async, batch = config.trainer.fully_async, config.trainer.train_batch_size
    path, stale = "trainer.fully_async", fully_async.max_staleness_steps
    if fully_async.sync_weight_interval - 1 > stale:
        yield Problem(
            f"{path}.max_staleness_steps",
            f"expected at least {fully_async.sync_weight_interval - 1}, because engines get weights every "
            f"{fully_async.sync_weight_interval} steps ({path}.sync_weight_interval), found {stale}",
        )
    groups = fully_async.num_parallel_generation_workers
    most, surplus = batch * (stale + 1), config.trainer.surplus_groups
    if groups is not None and not batch <= groups <= most + surplus:
        more = f", and {surplus} of oversampling_ratio" if surplus else ""
        yield Problem(
            f"{path}.num_parallel_generation_workers",
            f"expected from {batch} (trainer.train_batch_size) to {most + surplus} (times max_staleness_steps + 1{more}), found {groups}",
        )


def _checkpoints(config: ConfigTree) -> Iterator[Problem]:
    trainer = config.trainer
    if trainer.max_ckpts_to_keep == 0:
        yield Problem(
            "trainer.max_ckpts_to_keep",
            "0 would delete every checkpoint; expected -1 (keep all) or at least 1; trainer.ckpt_interval=0 writes none",
        )
    keeps = {"ckpt_keep_every": trainer.ckpt_keep_every, "ckpt_keep_best": trainer.ckpt_keep_best}
    for name, value in keeps.items():
        if value and trainer.max_ckpts_to_keep < 0:
            yield Problem(f"trainer.{name}", "has no effect where all are kept; set trainer.max_ckpts_to_keep")
    if trainer.keep_when_done == "last" and not trainer.saves_checkpoints:
        yield Problem("trainer.keep_when_done", "there is no last checkpoint with trainer.ckpt_interval=0")
    if trainer.keep_when_done == "export" and trainer.hf_save_interval <= 0:
        yield Problem("trainer.keep_when_done", '"export" needs exports: set trainer.hf_save_interval, or "last"')
    best = trainer.ckpt_keep_best or ""
    if best and trainer.best_mode is None:
        yield Problem(
            "trainer.ckpt_keep_best_mode",
            f'required with trainer.ckpt_keep_best="{best}", of which hpcrl does not know it: "max" if higher values are better, or "min"',
        )
    if best.startswith("eval/") and trainer.eval_interval <= 0:
        yield Problem(
            "trainer.ckpt_keep_best", "nothing is evaluated with trainer.eval_interval=0; set that, or another metric"
        )
    if trainer.resume_mode == "from_path" and trainer.resume_path is None:
        yield Problem("trainer.resume_path", 'required with trainer.resume_mode="from_path": a checkpoint directory')
    if trainer.resume_mode != "from_path" and trainer.resume_path is not None:
        yield Problem(
            "trainer.resume_path",
            f'has no effect with trainer.resume_mode="{trainer.resume_mode}"; set trainer.resume_mode="from_path" or leave it out',
        )


def _experts(config: ConfigTree) -> Iterator[Problem]:
    engine = config.generator.inference_engine
    together = engine.data_parallel_size * engine.tensor_parallel_size
    if engine.expert_parallel_size not in (1, together):
        yield Problem(
            "generator.inference_engine.expert_parallel_size",
            f"expected 1 or data_parallel_size x tensor_parallel_size ({together}), found {engine.expert_parallel_size}",
        )


_CALCULATING: tuple[Rule, ...] = (
    whole_mini_batches,
    parallel_sizes,
    expert_sizes,
    equal_shares,
    shared_tokens,
    enough_samples,
    sharding,
    _staleness,
    colocated_engines,
    lent_gpus,
)
"""Rules that divide and multiply what `_COUNTED` names; they run only where all of that is in range."""

RULES: tuple[Rule, ...] = (
    _named_functions,
    _loggers,
    alerts,
    datasets,
    critic_apart,
    shared_gpus,
    *_CALCULATING,
    shared_prefixes,
    without_effect,
    pipeline,
    reference_layout,
    _lora,
    adapted_experts,
    recomputation,
    kernels,
    low_precision,
    moments,
    muon,
    schedule_free,
    parameter_groups,
    _warm_up,
    units,
    rotary_positions,
    frozen,
    routers,
    preference_losses,
    reward_models,
    profiles,
    _critic,
    _reference,
    _off_policy,
    estimated_old_logprobs,
    one_set_of_bits,
    _bounds,
    not_switched_on,
    _checkpoints,
    uploads,
    lengths,
    several_turns,
    learned_observations,
    chat,
    step_wise,
    rows_of_samples,
    sampling_parameters,
    sampled_distribution,
    best_of_samples,
    dynamic_sampling,
    _experts,
    teacher,
    own_teacher,
    tokens_of_the_policy,
    reference_apart,
    ranks_of_scorers,
    enough_scorers,
    reward_names,
    group_rewards,
    judges,
    filter_metrics,
    several_rewards,
    one_reward_source,
    overlong,
    remote_reward,
    scoring_reward_model,
    environments,
    endpoint,
    agents,
    robots,
    engine_of_family,
    engine_options,
    settings_of_engines,
    rules_of_backends,
    copies_of_weights,
    ways_of_weights,
    enough_replicas,
    eval_replicas,
    evaluation_job,
    sandboxes,
    gpus_of_nodes,
    requests,
    sbatch_options,
    shared_secrets,
    container,
    counted_gpus,
    time_to_save,
)
