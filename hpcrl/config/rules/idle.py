"""Settings that another one switches on: refused where they are set and it does not, because a file should not promise what does not happen.

It holds for all that bears on the result. How a part runs that may be switched off, the sections slurm, trainer.ref and trainer.profiler, may
stay: a site's file serves runs with and without containers, and a sweep runs with and without a reference.
A loss or an advantage estimator of the user's own may read any setting of trainer.algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

from hpcrl.config.adapters import engines_load
from hpcrl.config.derive import has_engines, is_offline, reward_weights, self_teacher, trains_pairs, uses_reference
from hpcrl.config.errors import Problem
from hpcrl.config.fields import values
from hpcrl.config.scorers import scorer_sets
from hpcrl.config.sections.algorithm import POLICY_LOSSES, AlgorithmConfig
from hpcrl.config.sections.distillation import DistillationConfig
from hpcrl.config.sections.environment import RewardServiceConfig, ScoringRewardModelConfig
from hpcrl.config.sections.model import OptimizerConfig, ShardingConfig
from hpcrl.config.sections.trainer import UploadConfig
from hpcrl.config.sections.tree import ConfigTree

_ALGORITHM = "trainer.algorithm."
_CORRECTION = f"{_ALGORITHM}off_policy_correction."
_DYNAMIC = f"{_ALGORITHM}dynamic_sampling."
_REWARD_MODEL = "environment.reward_model."
_SERVICE = "environment.remote_reward.service."
_REFERENCE = f"{_ALGORITHM}use_kl_loss or use_kl_in_reward"

_OF_FSDP2 = (
    *("placement.fsdp_size", "use_sample_packing", "compile_model"),
    *(f"fsdp_config.{one.name}" for one in fields(ShardingConfig)),
)
_OF_RANKS = "micro_batch_size_per_gpu", "max_tokens_per_micro_batch", "fsdp_config.mixed_precision.param_dtype"
_OF_MEGATRON = tuple(f"placement.{name}_parallel_size" for name in ("tensor", "pipeline", "expert"))
_OF_SCORERS = (
    *(
        "model_revision",
        "source_models",
        "placement",
        "backend",
        "engine",
        "fsdp_config",
        "compile_model",
        "micro_batch_size_per_gpu",
    ),
    *("batch_size_per_replica", "max_tokens_per_micro_batch", "use_sample_packing"),
)
_OF_SAMPLES = (
    *("use_rewards", "self_teacher", "kl_penalty_coef", "kl_discount_factor", "include_prompt"),
    *("top_k_from_teacher", "rollout_top_k_recompute"),
)
_RECOMPUTED = "use_reentrant", "every", "keep"
_REDUCTION = ("loss_reduction", "max_seq_len", "unbiased_loss_max_tokens")

READ_BY_LOSSES: dict[str, tuple[str, ...]] = {
    "eps_clip_low": ("regular", "dual_clip", "gspo", "rollout_is", "clip_cov"),
    "eps_clip_high": ("regular", "dual_clip", "gspo", "rollout_is", "clip_cov"),
    "clip_ratio_c": ("dual_clip",),
    "aipo_rho": ("aipo",),
    **{one.name: (one.name,) for one in fields(AlgorithmConfig) if one.name in POLICY_LOSSES},
}
"""Settings and sections of trainer.algorithm to the losses that read them."""


@dataclass(frozen=True)
class Switch:
    """What switches some settings on.

    Attributes:
        paths: settings and sections.
        needs: the switch, as an error names it.
        is_on: whether it does.
    """

    paths: tuple[str, ...]
    needs: str
    is_on: Callable[[ConfigTree], bool]


def _is_loss(*losses: str) -> Callable[[ConfigTree], bool]:
    return lambda config: config.trainer.algorithm.policy_loss_type in losses


def _discounts(config: ConfigTree) -> bool:
    return config.trainer.algorithm.advantage_estimator in ("gae", "reinforce++") or _has_critic(config)


def _uses_gdpo(config: ConfigTree) -> bool:
    return config.trainer.algorithm.advantage_estimator == "gdpo"


def _has_critic(config: ConfigTree) -> bool:
    return config.trainer.critic.model.path is not None


def _has_reference(config: ConfigTree) -> bool:
    return uses_reference(config.trainer)


def _corrects(name: str, value: str) -> Callable[[ConfigTree], bool]:
    return lambda config: getattr(config.trainer.algorithm.off_policy_correction, name) == value


def _judges_groups(config: ConfigTree) -> bool:
    algorithm = config.trainer.algorithm
    return algorithm.zero_variance_filter or algorithm.dynamic_sampling.type is not None


def _penalizes_length(config: ConfigTree) -> bool:
    return any("overlong" in reward_weights(config.environment, kind) for kind in ("train", "eval"))


def _of_optimizer(role: str) -> tuple[Switch, ...]:
    def optimizer(config: ConfigTree) -> OptimizerConfig:
        return getattr(config.trainer, role).optimizer_config

    path = f"trainer.{role}.optimizer_config."
    return (
        Switch(
            (f"{path}offload_after_step",),
            "trainer.placement.colocate_all",
            lambda config: config.trainer.placement.colocate_all,
        ),
        Switch(
            (f"{path}decay_ratio", f"{path}min_lr_factor"),
            f"a {path}scheduler that falls",
            lambda config: optimizer(config).scheduler != "constant_with_warmup",
        ),
        Switch(
            (f"{path}warmup_start_factor", f"{path}warmup_shape"),
            f"a warm-up ({path}num_warmup_steps or warmup_ratio)",
            lambda config: bool(optimizer(config).num_warmup_steps or optimizer(config).warmup_ratio),
        ),
    )


_OF_ALGORITHM = (
    *(
        Switch((_ALGORITHM + name,), f"{_ALGORITHM}policy_loss_type={' or '.join(losses)}", _is_loss(*losses))
        for name, losses in READ_BY_LOSSES.items()
    ),
    Switch((f"{_ALGORITHM}gamma",), f"{_ALGORITHM}advantage_estimator=gae or reinforce++, or a critic", _discounts),
    Switch((f"{_ALGORITHM}lambd", f"{_ALGORITHM}value_clip"), "trainer.critic.model.path", _has_critic),
    Switch(
        (f"{_ALGORITHM}grpo_norm_by_std",),
        f"{_ALGORITHM}advantage_estimator=grpo",
        lambda config: config.trainer.algorithm.advantage_estimator == "grpo",
    ),
    Switch((f"{_ALGORITHM}gdpo",), f"{_ALGORITHM}advantage_estimator=gdpo", _uses_gdpo),
    Switch(
        (f"{_ALGORITHM}entropy_loss_coef",),
        f"{_ALGORITHM}use_entropy_loss=true",
        lambda config: config.trainer.algorithm.use_entropy_loss,
    ),
    Switch((f"{_ALGORITHM}kl_loss_coef", f"{_ALGORITHM}kl_estimator_type"), _REFERENCE, _has_reference),
    Switch(
        (f"{_ALGORITHM}kl_importance_weighted",),
        f"{_ALGORITHM}use_kl_loss, because only the loss has a gradient",
        lambda config: config.trainer.algorithm.use_kl_loss,
    ),
    Switch(
        (f"{_ALGORITHM}kl_ctrl.type",),
        f"{_ALGORITHM}use_kl_in_reward, whose weight it adapts",
        lambda config: config.trainer.algorithm.use_kl_in_reward,
    ),
    Switch(
        (f"{_ALGORITHM}kl_ctrl.kl_target", f"{_ALGORITHM}kl_ctrl.horizon"),
        f'{_ALGORITHM}kl_ctrl.type="adaptive"',
        lambda config: config.trainer.algorithm.kl_ctrl.type == "adaptive",
    ),
    Switch(
        (f"{_ALGORITHM}reset_optimizer_with_reference",),
        f"{_ALGORITHM}reference_reset_interval",
        lambda config: config.trainer.algorithm.reference_reset_interval is not None,
    ),
    Switch(
        (f"{_ALGORITHM}max_seq_len",),
        f"{_ALGORITHM}loss_reduction=seq_mean_token_sum_norm",
        lambda config: config.trainer.algorithm.loss_reduction == "seq_mean_token_sum_norm",
    ),
    Switch(
        (f"{_ALGORITHM}unbiased_loss_max_tokens",),
        f"{_ALGORITHM}loss_reduction=seq_mean_token_mean",
        lambda config: config.trainer.algorithm.loss_reduction == "seq_mean_token_mean",
    ),
    Switch(
        (f"{_CORRECTION}token_tis_ratio_clip_high", f"{_CORRECTION}token_tis_ratio_drop_high"),
        f'{_CORRECTION}tis_ratio_type="token"',
        _corrects("tis_ratio_type", "token"),
    ),
    Switch(
        (f"{_CORRECTION}sequence_tis_ratio_clip_high",),
        f'{_CORRECTION}tis_ratio_type="sequence"',
        _corrects("tis_ratio_type", "sequence"),
    ),
    Switch(
        (f"{_CORRECTION}geo_mask_low", f"{_CORRECTION}geo_mask_high"),
        f'{_CORRECTION}sequence_mask_metric="geometric"',
        _corrects("sequence_mask_metric", "geometric"),
    ),
    Switch(
        (f"{_CORRECTION}product_mask_low", f"{_CORRECTION}product_mask_high"),
        f'{_CORRECTION}sequence_mask_metric="product"',
        _corrects("sequence_mask_metric", "product"),
    ),
)

_OF_MODES = (
    Switch(
        (
            *("trainer.max_length", "data.too_long", "data.lost", "data.weights", "data.num_workers", "data.prefetch_factor", "data.cache"),
            *("data.subset", "data.revision", "data.val_subset", "data.val_revision", "data.local_dir"),
        ),
        'trainer.mode="sft", "dpo" or "reward_model"',
        lambda config: is_offline(config.trainer),
    ),
    Switch(
        ("data.val_prompts",),
        'trainer.mode="sft" or "dpo"',
        lambda config: config.trainer.mode in ("sft", "dpo"),
    ),
    Switch(
        ("data.conversation_column", "data.format", "data.text_column", "data.train_on_what", "trainer.distillation.precomputed_logprobs"),
        'trainer.mode="sft"',
        lambda config: config.trainer.mode == "sft",
    ),
    Switch(
        ("data.chosen_column", "data.rejected_column"),
        'trainer.mode="dpo" or "reward_model"',
        lambda config: trains_pairs(config.trainer),
    ),
    Switch(
        ("data.response_column",),
        'trainer.mode="rl" or "sft", or data.val_prompts',
        lambda config: not trains_pairs(config.trainer) or has_engines(config),
    ),
    Switch(
        tuple(f"trainer.distillation.{one.name}" for one in fields(DistillationConfig) if one.name != "enable"),
        "trainer.distillation.enable",
        lambda config: config.trainer.distillation.enable,
    ),
    Switch(
        tuple(f"trainer.distillation.{name}" for name in ("loss_weight", "jsd_beta", "top_k_from_teacher", "rollout_top_k_recompute")),
        "trainer.distillation.top_k",
        lambda config: config.trainer.distillation.top_k > 0,
    ),
    Switch(
        tuple(f"trainer.distillation.{name}" for name in _OF_FSDP2),
        'trainer.distillation.backend="fsdp2"',
        lambda config: config.trainer.distillation.backend == "fsdp2",
    ),
    Switch(
        tuple(f"trainer.distillation.{name}" for name in (*_OF_RANKS, "placement.sequence_parallel_size")),
        'trainer.distillation.backend="fsdp2" or "megatron"',
        lambda config: config.trainer.distillation.backend != "vllm",
    ),
    Switch(
        tuple(f"trainer.distillation.{name}" for name in _OF_MEGATRON),
        'trainer.distillation.backend="megatron"',
        lambda config: config.trainer.distillation.backend == "megatron",
    ),
    Switch(
        ("trainer.distillation.engine",),
        'trainer.distillation.backend="vllm"',
        lambda config: config.trainer.distillation.backend == "vllm",
    ),
    Switch(
        ("trainer.distillation",), 'trainer.mode="rl" or "sft"', lambda config: not trains_pairs(config.trainer)
    ),
    Switch(
        tuple(f"trainer.distillation.{name}" for name in ("use_rewards", "kl_penalty_coef", "kl_discount_factor")),
        "trainer.distillation.loss_weight below 1",
        lambda config: config.trainer.distillation.loss_weight < 1,
    ),
    Switch(
        tuple(f"trainer.distillation.{name}" for name in _OF_SCORERS),
        "a teacher of its own (trainer.distillation.self_teacher.model unset)",
        lambda config: self_teacher(config.trainer) is None,
    ),
    Switch(
        tuple(f"trainer.distillation.self_teacher.{name}" for name in ("success_reward", "template", "ema_rate")),
        "trainer.distillation.self_teacher.model",
        lambda config: self_teacher(config.trainer) is not None,
    ),
    Switch(
        ("trainer.distillation.self_teacher.ema_rate",),
        'trainer.distillation.self_teacher.model="ema"',
        lambda config: self_teacher(config.trainer) == "ema",
    ),
    Switch(
        ("trainer.distillation.rollout_top_k_recompute",),
        "trainer.distillation.top_k_from_teacher=false",
        lambda config: not config.trainer.distillation.top_k_from_teacher,
    ),
    Switch(("trainer.dpo",), 'trainer.mode="dpo"', lambda config: config.trainer.mode == "dpo"),
    Switch(
        ("trainer.reward_model", "data.margin_column"),
        'trainer.mode="reward_model"',
        lambda config: config.trainer.mode == "reward_model",
    ),
    Switch(
        ("trainer.dpo.label_smoothing",),
        "robust in trainer.dpo.loss_type",
        lambda config: "robust" in config.trainer.dpo.loss_type,
    ),
    Switch(
        tuple(_ALGORITHM + name for name in _REDUCTION),
        'trainer.mode="rl" or "sft"',
        lambda config: not trains_pairs(config.trainer),
    ),
    Switch(
        (
            *(f"{_ALGORITHM}{one.name}" for one in fields(AlgorithmConfig) if one.name not in _REDUCTION),
            *("trainer.fully_async", "trainer.critic", "trainer.critic_mini_batch_size"),
            *(f"trainer.distillation.{name}" for name in (*_OF_SCORERS[1:], *_OF_SAMPLES)),
            *("generator.n_samples_per_prompt", "generator.step_wise_trajectories", "environment.reward_model"),
        ),
        'trainer.mode="rl"',
        lambda config: not is_offline(config.trainer),
    ),
    Switch(
        (
            *("generator.sampling_params", "generator.max_turns", "environment", "trainer.max_prompt_length"),
            *("generator.eval_sampling_params", "generator.eval_n_samples_per_prompt", "slurm.elastic.replicas", "trainer.multi_modal_log_interval"),
        ),
        'data.val_prompts, or trainer.mode="rl"',
        has_engines,
    ),
)  # fmt: skip

_OTHERS = (
    Switch(
        (
            *(f"{_ALGORITHM}value_head_prefix", "trainer.critic", "trainer.critic_mini_batch_size"),
            *("trainer.placement.critic_num_nodes", "trainer.placement.critic_num_gpus_per_node"),
        ),
        "trainer.critic.model.path",
        _has_critic,
    ),
    Switch(
        (f"{_DYNAMIC}max_sample_batches",),
        f"{_DYNAMIC}type",
        lambda config: config.trainer.algorithm.dynamic_sampling.type is not None,
    ),
    Switch(
        (f"{_DYNAMIC}min_replace_ratio",),
        f'{_DYNAMIC}type="replace"',
        lambda config: config.trainer.algorithm.dynamic_sampling.type == "replace",
    ),
    Switch(
        (f"{_ALGORITHM}filter_reward_metric",), f"{_DYNAMIC}type or {_ALGORITHM}zero_variance_filter", _judges_groups
    ),
    Switch(
        ("trainer.policy.activation_offload", *(f"trainer.gradient_checkpointing_{how}" for how in _RECOMPUTED)),
        "trainer.gradient_checkpointing=true",
        lambda config: config.trainer.gradient_checkpointing,
    ),
    Switch(
        ("trainer.ckpt_keep_best_mode",),
        "trainer.ckpt_keep_best",
        lambda config: config.trainer.ckpt_keep_best is not None,
    ),
    *_OF_MODES,
    Switch(
        ("generator.inference_engine.merge_lora", "generator.inference_engine.fully_sharded_loras"),
        "trainer.policy.model.lora.rank",
        lambda config: config.trainer.policy.model.lora.rank > 0,
    ),
    Switch(
        ("generator.inference_engine.fully_sharded_loras",),
        "generator.inference_engine.merge_lora=false",
        lambda config: not config.generator.inference_engine.merge_lora,
    ),
    Switch(
        ("generator.inference_engine.fully_sharded_loras",),
        "adapters that engines load: no modules_to_save or target_parameters, and no init_method that changes the weights (olora, pissa)",
        lambda config: engines_load(config.trainer.policy.model.lora),
    ),
    Switch(
        ("trainer.max_unscored_ratio",),
        "trainer.distillation.enable, a reference on nodes of its own (trainer.placement.colocate_policy_ref=false), or environment.reward_model.model",
        lambda config: bool(scorer_sets(config)),
    ),
    Switch(
        ("trainer.alerts.command", "trainer.alerts.webhook", "trainer.alerts.webhook_file"),
        "trainer.alerts.rules",
        lambda config: bool(config.trainer.alerts.rules),
    ),
    Switch(
        tuple(
            f"generator.inference_engine.{name}"
            for name in ("http_endpoint_host", "http_endpoint_port", "served_model_name")
        ),
        "generator.inference_engine.enable_http_endpoint=true",
        lambda config: config.generator.inference_engine.enable_http_endpoint,
    ),
    Switch(("data.shuffle_seed",), "data.shuffle=true", lambda config: config.data.shuffle),
    Switch(("data.prefetch_factor",), "data.num_workers", lambda config: config.data.num_workers > 0),
    Switch(("environment.overlong_reward",), "overlong in environment.reward_function", _penalizes_length),
    Switch(
        ("environment.remote_reward",),
        "environment.remote_reward.enable=true",
        lambda config: config.environment.remote_reward.enable,
    ),
    Switch(
        tuple(f"{_SERVICE}{one.name}" for one in fields(RewardServiceConfig) if one.name != "model"),
        f"{_SERVICE}model",
        lambda config: config.environment.remote_reward.service.model is not None,
    ),
    Switch(
        tuple(f"{_REWARD_MODEL}{one.name}" for one in fields(ScoringRewardModelConfig) if one.name != "model"),
        f"{_REWARD_MODEL}model",
        lambda config: config.environment.reward_model.model is not None,
    ),
    Switch(
        tuple(f"trainer.upload.{one.name}" for one in fields(UploadConfig) if one.name.startswith("hf_")),
        "trainer.upload.hf",
        lambda config: config.trainer.upload.hf,
    ),
    Switch(
        tuple(f"trainer.upload.{one.name}" for one in fields(UploadConfig) if one.name.startswith("s3_")),
        "trainer.upload.s3",
        lambda config: config.trainer.upload.s3 is not None,
    ),
    Switch(
        ("trainer.ref.model.revision",),
        "trainer.ref.model.path",
        lambda config: config.trainer.ref.model.path is not None,
    ),
    *_of_optimizer("policy"),
    *_of_optimizer("critic"),
)

SWITCHES = (*_OF_ALGORITHM, *_OTHERS)


def not_switched_on(config: ConfigTree) -> Iterator[Problem]:
    algorithm = config.trainer.algorithm
    own = ":" in algorithm.policy_loss_type or ":" in algorithm.advantage_estimator
    idle = [switch for switch in (_OTHERS if own else SWITCHES) if not switch.is_on(config)]
    for setting, value in values(config):
        if setting.is_default(value):
            continue
        for switch in idle:
            if any(setting.path == path or setting.path.startswith(path + ".") for path in switch.paths):
                yield Problem(setting.path, f"has no effect without {switch.needs}; leave it out, or set that")
                break
