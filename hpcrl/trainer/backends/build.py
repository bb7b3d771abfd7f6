"""The configured backend, behind the verbs of hpcrl/trainer/backends/base.py."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from importlib.util import find_spec
from typing import cast

from hpcrl.config.import_path import missing_packages
from hpcrl.config.sections.trainer import TrainerConfig
from hpcrl.errors import RunError
from hpcrl.trainer.backends.base import CriticEngine, PolicyEngine
from hpcrl.trainer.distributed import World

_log = logging.getLogger(__name__)

_COMPILED = "compile_model", "use_torch_compile"
_PLAIN = {"llama", "mistral", "qwen2", "qwen3"}
"""Model types whose layers are attention and a gated MLP, and nothing else."""


def build_policy(trainer: TrainerConfig, temperature: float, world: World) -> PolicyEngine:
    """Load the policy and, if anything compares with it, the reference; or the reward model that is trained in its place.

    A reward model has the verbs that every engine has, `values` and those of an export. What else a policy has is not asked for then.

    Raises:
        DataError: a model path holds no model, or the model does not have what the configuration names.
        RunError: Megatron-core, or a package that a setting needs, is not installed.
    """
    if trainer.strategy == "megatron":  # an extra, that is not imported where it is not used
        _require_megatron()
        from hpcrl.trainer.backends.megatron.engine import MegatronPolicy, MegatronRewardModel
        from hpcrl.trainer.backends.megatron.layers import describe_layers

        if world.first:
            _log.info("layers: %s", describe_layers())
        if trainer.trains_reward_model:
            return cast(PolicyEngine, MegatronRewardModel(trainer, world))
        return MegatronPolicy(trainer, temperature, world)
    require_packages(trainer)
    from hpcrl.trainer.backends.fsdp.engine import FsdpPolicy, FsdpRewardModel

    trainer = with_compilation(trainer, world)
    if trainer.trains_reward_model:
        return cast(PolicyEngine, FsdpRewardModel(trainer, world))
    return FsdpPolicy(trainer, temperature, world)


def build_critic(trainer: TrainerConfig, world: World) -> CriticEngine | None:
    """Load the critic; None where the configuration names none."""
    if trainer.critic.model.path is None:
        return None
    if trainer.strategy == "megatron":
        from hpcrl.trainer.backends.megatron.engine import MegatronCritic

        return MegatronCritic(trainer, world)
    require_packages(trainer)
    from hpcrl.trainer.backends.fsdp.engine import FsdpCritic

    return FsdpCritic(trainer, world)


def with_compilation(trainer: TrainerConfig, world: World) -> TrainerConfig:
    """Return the section with `compile_model` and `use_torch_compile` set, the same on every rank. All ranks call it.

    Where both are unset and this turns them on, code that torch cannot compile later runs eagerly. A frame is compiled before it runs, so
    ranks need not agree on that. What is set to true raises torch's error instead.
    """
    from hpcrl.trainer.models.build import policy_source
    from hpcrl.trainer.models.layers.compilation import compiler_works, fall_back_to_eager

    policy = trainer.policy
    unset = [name for name in _COMPILED if getattr(policy, name) is None]
    if not unset:
        return trainer
    compiles = (
        world.device.type == "cuda"
        and _measured(trainer)
        and world.rank0_broadcast(lambda: policy_source(trainer).config().model_type in _PLAIN)
        and compiler_works(world)
    )
    if compiles and len(unset) == len(_COMPILED):
        fall_back_to_eager()
    return replace(trainer, policy=replace(policy, **dict.fromkeys(unset, compiles)))


def _measured(trainer: TrainerConfig) -> bool:
    policy, fsdp = trainer.policy, trainer.policy.fsdp_config
    others = (
        trainer.shared_prefixes,
        trainer.gradient_checkpointing_use_reentrant,
        trainer.gradient_checkpointing_keep != "nothing",
        policy.activation_offload,
        policy.enable_liger_kernel,
        policy.low_precision.fp8,
        policy.sequence_parallel_size > 1,
        fsdp.cpu_offload,
    )
    return (
        not any(others)
        and trainer.use_sample_packing
        and trainer.flash_attn
        and fsdp.mixed_precision.param_dtype == "bf16"
    )


def _require_megatron() -> None:
    if find_spec("megatron") is None:
        raise RunError(
            f"trainer.strategy=megatron needs Megatron-core, which {sys.executable} does not have: pip install 'hpcrl[megatron]'"
        )


def require_packages(trainer: TrainerConfig) -> None:
    """Raise RunError where a package that a setting needs is not installed."""
    if problem := next(missing_packages(trainer), None):
        raise RunError(f"{problem.path}: {problem.message}")
