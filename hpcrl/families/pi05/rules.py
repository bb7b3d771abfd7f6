"""Rules about policies whose actions are made by a flow."""

from __future__ import annotations

from collections.abc import Iterator

from hpcrl.config.errors import Problem
from hpcrl.config.sections.generator import GeneratorConfig
from hpcrl.config.sections.model import ExpertsConfig
from hpcrl.config.sections.tree import ConfigTree
from hpcrl.config.sections.vla import Pi05Config, VLAConfig

_PI05 = 'vla.vla_type="pi05"'


def flows(config: ConfigTree) -> Iterator[Problem]:
    """Requirements of training and serving a flow of actions, and of its probabilities."""
    vla, trainer, environment = config.vla, config.trainer, config.environment
    if not vla.moves_by_flow:
        if vla.enable and vla.pi05 != Pi05Config():
            yield Problem("vla.pi05", f"has no effect without {_PI05}; leave it out, or set that")
        return
    for name in ("unnorm_key", "norm_type"):
        if getattr(vla, name) != getattr(VLAConfig(), name):
            yield Problem(
                f"vla.{name}", f"has no effect with {_PI05}, whose statistics lie beside the model; leave it out"
            )
    if trainer.strategy != "fsdp2":
        yield Problem("trainer.strategy", f"expected fsdp2 with {_PI05}: Megatron-core has no such models")
    if environment.env_class not in (None, "robot"):
        yield Problem("environment.env_class", f'expected "robot" with {_PI05}, found "{environment.env_class}"')
    if vla.pi05.noise_method == "flow_cps" and (vla.pi05.noise_level > 1 or vla.pi05.num_steps == 1):
        yield Problem(
            "vla.pi05.noise_method",
            f"flow_cps draws all steps but the last, and at most all of their noise. Expected num_steps of at least 2 and noise_level of at "
            f"most 1, found {vla.pi05.num_steps} and {vla.pi05.noise_level}; or use flow_sde",
        )


def of_tokens(config: ConfigTree) -> Iterator[Problem]:
    """Settings about tokens of a vocabulary, or about layers of language models."""
    trainer, generator, algorithm, vla = config.trainer, config.generator, config.trainer.algorithm, config.vla
    if not vla.moves_by_flow:
        return
    policy, engine, usual = trainer.policy, generator.inference_engine, GeneratorConfig()
    used = {
        "generator.sampling_params": generator.sampling_params != usual.sampling_params,
        "generator.eval_sampling_params": generator.eval_sampling_params != usual.eval_sampling_params,
        "trainer.critic.model.path": trainer.critic.model.path is not None,
        "trainer.algorithm.use_entropy_loss": algorithm.use_entropy_loss,
        "trainer.algorithm.top_entropy_quantile": algorithm.top_entropy_quantile < 1,
        'trainer.algorithm.advantage_estimator="remax"': algorithm.needs_baselines,
        'trainer.algorithm.advantage_estimator="optimal_token_baseline"': algorithm.needs_norms,
        "trainer.algorithm.min_filter_prefix_tokens": algorithm.min_filter_prefix_tokens is not None,
        "trainer.algorithm.observation_nll_coef": algorithm.observation_nll_coef is not None,
        "trainer.shared_prefixes": trainer.shared_prefixes,
        "trainer.gradient_checkpointing_use_reentrant": trainer.gradient_checkpointing_use_reentrant,
        "trainer.gradient_checkpointing_every": trainer.gradient_checkpointing_every > 1,
        "trainer.policy.activation_offload": policy.activation_offload,
        "trainer.policy.compile_model": policy.compile_model,
        "trainer.policy.enable_liger_kernel": policy.enable_liger_kernel,
        "trainer.policy.low_precision.fp8": policy.low_precision.fp8,
        "trainer.policy.sequence_parallel_size": policy.sequence_parallel_size > 1,
        "trainer.policy.experts": policy.experts != ExpertsConfig(),
        "trainer.policy.model_config_kwargs": bool(policy.model_config_kwargs),
        "trainer.rope_scaling": bool(trainer.rope_scaling),
        "trainer.rope_theta": trainer.rope_theta is not None,
        "generator.chat_template": bool(generator.chat_template.name_or_path),
        "generator.inference_engine.remote_urls": bool(engine.remote_urls),
        "generator.inference_engine.merge_lora": engine.merge_lora,
    }
    for name in (name for name, wanted in used.items() if wanted):
        yield Problem(
            name.partition("=")[0], f"belongs to policies that choose among tokens; leave it out with {_PI05}"
        )


RULES = (flows, of_tokens)
