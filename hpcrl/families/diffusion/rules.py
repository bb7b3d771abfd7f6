"""Rules about policies that are diffusion pipelines: what they need, and what belongs to language models alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpcrl.config.errors import Problem
from hpcrl.config.fields import values
from hpcrl.config.sections.functions import IMAGE_REWARDS, REWARDS
from hpcrl.config.sections.model import ExpertsConfig
from hpcrl.config.sections.tree import ConfigTree

_SECTION = "trainer.policy.diffusers"
_BACKEND = "generator.inference_engine.backend"
_OF_ROWS = tuple(f"{_SECTION}.{name}" for name in ("weighting_scheme", "logit_mean", "logit_std"))
_OF_TEXTS = (
    *(
        "trainer.max_length",
        "data.too_long",
        "data.format",
        "data.conversation_column",
        "data.text_column",
        "data.train_on_what",
    ),
    *("data.image_processor_kwargs", "data.response_column", "data.cache"),
    *("data.video_column", "data.video_frames", "data.video_pixels"),
    *(f"{_SECTION}.{name}" for name in ("algorithm", "timesteps_fraction", "nft_beta", "weight_copy_decay_type")),
)
"""Settings of rows of texts, or of samples that are trained by rewards."""
_OF_VIDEOS = f"{_SECTION}.train_frames", f"{_SECTION}.inference_frames"
_OF_SAMPLING = f"{_SECTION}.sample", "trainer.multi_modal_log_interval"


def pipelines(config: ConfigTree) -> Iterator[Problem]:
    """Requirements of training and serving a pipeline."""
    engine, trainer = config.generator.inference_engine, config.trainer
    if not trainer.policy.diffusers.enable:
        if engine.backend == "diffusers":
            yield Problem(
                _BACKEND, f"diffusers makes pictures; set {_SECTION}.enable=true, or choose vllm or transformers"
            )
        return
    if trainer.mode not in ("rl", "sft"):
        yield Problem(
            "trainer.mode",
            f'expected "rl" or "sft" with {_SECTION}.enable: pairs and scores are learned by language models',
        )
    if trainer.strategy != "fsdp2":
        yield Problem(
            "trainer.strategy", f"expected fsdp2 with {_SECTION}.enable: Megatron-core has no such transformers"
        )
    if config.slurm.gpus == 0 and _of_half(config):
        yield Problem(
            f"{_SECTION}.dtype",
            "without GPUs a text encoder in float16 has no kernels for some of its layers; set it to float32 or bfloat16",
        )


def _of_half(config: ConfigTree) -> bool:
    return config.trainer.policy.diffusers.dtype == "float16"


def sampling(config: ConfigTree) -> Iterator[Problem]:
    """Requirements of a sampler, and of losses that need one of its kinds."""
    diffusers = config.trainer.policy.diffusers
    sample, path = diffusers.sample, f"{_SECTION}.sample"
    if not (config.trainer.policy.diffusers.enable and config.has_engines):
        return
    if sample.solver in ("dpm1", "dpm2") and not sample.deterministic_sampling:
        yield Problem(f"{path}.deterministic_sampling", f"{sample.solver} needs it; set it to true")
    if config.trainer.offline:
        return
    if diffusers.algorithm == "grpo" and (sample.solver in ("dpm1", "dpm2") or not diffusers.sample.stochastic):
        yield Problem(
            f"{_SECTION}.algorithm",
            f'"grpo" trains probabilities of steps, which only steps have that are drawn: set {path}.solver to flow, dance or ddim, '
            "deterministic_sampling=false, and noise_level above 0",
        )
    if diffusers.algorithm == "grpo" and sample.solver == "ddim" and diffusers.timesteps_fraction == 1:
        yield Problem(
            f"{path}.solver", "the last step of ddim is no draw and has no probability; use flow or dance, or nft"
        )


def adapters_of_pipelines(config: ConfigTree) -> Iterator[Problem]:
    """Copies of weights, which only adapters are small enough for."""
    trainer, diffusers = config.trainer, config.trainer.policy.diffusers
    if not trainer.policy.diffusers.enable:
        return
    lora, optimizer = trainer.policy.model.lora, trainer.policy.optimizer_config.name
    if diffusers.ema.enable and optimizer == "ScheduleFreeAdamW":
        yield Problem(
            f"{_SECTION}.ema.enable",
            f"{optimizer} has an average of its own, which is evaluated; leave one of them out",
        )
    if lora.rank:
        unlike = {
            "init_method": lora.begins_from_weights,
            "modules_to_save": bool(lora.modules_to_save),
            "target_parameters": bool(lora.target_parameters),
        }
        for name in (name for name, used in unlike.items() if used):
            yield Problem(
                f"trainer.policy.model.lora.{name}",
                f"changes weights beside the adapters, which alone are kept and published with {_SECTION}.enable; leave it out",
            )
        return
    needing = {
        f'{_SECTION}.algorithm="nft"': diffusers.algorithm == "nft" and not trainer.offline,
        f"{_SECTION}.ema.enable": diffusers.ema.enable,
        "trainer.algorithm.use_kl_loss": trainer.algorithm.use_kl_loss and not trainer.offline,
    }
    for name in (name for name, used in needing.items() if used):
        yield Problem(
            "trainer.policy.model.lora.rank",
            f"required by {name}, for which weights are kept twice; set it, such as to 32",
        )


def of_language_models(config: ConfigTree) -> Iterator[Problem]:
    """Settings about tokens of a vocabulary, or about conversations."""
    trainer, generator, algorithm = config.trainer, config.generator, config.trainer.algorithm
    if not trainer.policy.diffusers.enable:
        return
    used = {
        "trainer.critic.model.path": trainer.critic.model.path is not None,
        "trainer.distillation.enable": trainer.distillation.enable,
        "trainer.algorithm.use_kl_in_reward": algorithm.use_kl_in_reward,
        "trainer.algorithm.use_entropy_loss": algorithm.use_entropy_loss,
        "trainer.algorithm.top_entropy_quantile": algorithm.top_entropy_quantile < 1,
        'trainer.algorithm.advantage_estimator="optimal_token_baseline"': algorithm.needs_norms,
        "trainer.algorithm.reference_reset_interval": algorithm.reference_reset_interval is not None,
        "trainer.update_ref_every_epoch": trainer.update_ref_every_epoch,
        "trainer.algorithm.min_filter_prefix_tokens": algorithm.min_filter_prefix_tokens is not None,
        "trainer.algorithm.observation_nll_coef": algorithm.observation_nll_coef is not None,
        "trainer.shared_prefixes": trainer.shared_prefixes,
        "trainer.gradient_checkpointing_use_reentrant": trainer.gradient_checkpointing_use_reentrant,
        "trainer.gradient_checkpointing_every": trainer.gradient_checkpointing_every > 1,
        "trainer.gradient_checkpointing_keep": trainer.gradient_checkpointing_keep != "nothing",
        "trainer.policy.activation_offload": trainer.policy.activation_offload,
        "trainer.policy.enable_liger_kernel": trainer.policy.enable_liger_kernel,
        "trainer.policy.low_precision.fp8": trainer.policy.low_precision.fp8,
        "trainer.policy.sequence_parallel_size": trainer.policy.sequence_parallel_size > 1,
        "trainer.policy.fsdp_config.expert_parallel_size": trainer.policy.fsdp_config.expert_parallel_size > 1,
        "trainer.policy.experts": trainer.policy.experts != ExpertsConfig(),
        "trainer.max_tokens_per_micro_batch": trainer.max_tokens_per_micro_batch is not None,
        "trainer.ref.model.path": trainer.ref.model.path is not None,
        "trainer.policy.model_config_kwargs": bool(trainer.policy.model_config_kwargs),
        "generator.max_turns": generator.max_turns > 1,
        "generator.inference_engine.enable_http_endpoint": generator.inference_engine.enable_http_endpoint,
        "generator.inference_engine.merge_lora": generator.inference_engine.merge_lora,
        "environment.env_class": config.environment.env_class is not None,
        "environment.reward_model.model": config.environment.reward_model.model is not None,
        "environment.group_reward_function": bool(config.environment.group_reward_function),
        "environment.remote_reward.service.model": bool(config.reward_services),
        'trainer.algorithm.advantage_estimator="remax"': algorithm.advantage_estimator == "remax",
    }
    for name in (name for name, wanted in used.items() if wanted):
        yield Problem(name.partition("=")[0], f"belongs to language models; leave it out with {_SECTION}.enable")


def learned_rows(config: ConfigTree) -> Iterator[Problem]:
    """Settings without effect on rows of pictures, or on learning by rewards, and frames of pictures."""
    if not config.trainer.policy.diffusers.enable:
        return
    if not config.trainer.policy.diffusers.is_video:
        for path in _changed(config, _OF_VIDEOS):
            yield Problem(path, f"has no effect without {_SECTION}.is_video; leave it out, or set that")
    offline = config.trainer.offline
    idle = _OF_TEXTS + (() if config.has_engines else _OF_SAMPLING) if offline else _OF_ROWS
    for path in _changed(config, idle):
        why = 'has no effect with trainer.mode="sft"' if offline else 'belongs to trainer.mode="sft"'
        yield Problem(path, f"{why} of {_SECTION}; leave it out")


def _changed(config: ConfigTree, paths: Sequence[str]) -> list[str]:
    """Return which of some settings, or of the sections that they are, are not at their defaults."""
    changed = [setting.path for setting, value in values(config) if not setting.is_default(value)]
    return [path for path in paths if any(f"{name}.".startswith(f"{path}.") for name in changed)]


def rewards_of_pictures(config: ConfigTree) -> Iterator[Problem]:
    """Rewards by modality: pictures need rewards of pictures, and texts those of texts."""
    environment, pictures = config.environment, config.trainer.policy.diffusers.enable
    for kind in ("train", "eval"):
        weights = environment.reward_weights(kind)
        wrong = [name for name in weights if name in REWARDS and (name in IMAGE_REWARDS) != pictures]
        if wrong:
            what = "reads texts, and the policy paints" if pictures else "looks at pictures, and the policy writes"
            own = kind == "eval" and environment.eval_reward_function
            yield Problem(
                f"environment.{'eval_reward_function' if own else 'reward_function'}",
                f'"{wrong[0]}" {what}; expected {", ".join(IMAGE_REWARDS) if pictures else "one of the others"}, or your own',
            )
            return
    asked = "eval" if config.trainer.offline else "train"
    scored = environment.reward_weights(asked) or environment.remote_reward.enable
    if pictures and config.has_engines and not scored:
        yield Problem(
            "environment.reward_function",
            f"required with {_SECTION}.enable: what a picture is worth, {', '.join(IMAGE_REWARDS)}, or your own function, or environment.remote_reward",
        )


RULES = (adapters_of_pipelines, learned_rows, of_language_models, pipelines, rewards_of_pictures, sampling)
