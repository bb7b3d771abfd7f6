"""The configured backend, behind the verbs of hpcrl/trainer/backends/base.py."""

from __future__ import annotations

import logging
import sys
from importlib.util import find_spec
from typing import cast

from hpcrl.config.import_path import missing_packages
from hpcrl.config.sections.trainer import TrainerConfig
from hpcrl.errors import RunError
from hpcrl.trainer.backends.base import CriticEngine, PolicyEngine
from hpcrl.trainer.distributed import World

_log = logging.getLogger(__name__)


def build_policy(trainer: TrainerConfig, temperature: float, world: World) -> PolicyEngine:
    """Load the language model that is the policy, and the reference if anything compares with it; or the reward model that is trained in its place.

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
    from hpcrl.trainer.backends.fsdp.engine import FsdpPolicy
    from hpcrl.trainer.backends.fsdp.values import FsdpRewardModel
    from hpcrl.trainer.models.layers.compilation import with_compilation

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
    from hpcrl.trainer.backends.fsdp.values import FsdpCritic

    return FsdpCritic(trainer, world)


def _require_megatron() -> None:
    if find_spec("megatron") is None:
        raise RunError(
            f"trainer.strategy=megatron needs Megatron-core, which {sys.executable} does not have: pip install 'hpcrl[megatron]'"
        )


def require_packages(trainer: TrainerConfig) -> None:
    """Raise RunError where a package that a setting needs is not installed."""
    if problem := next(missing_packages(trainer), None):
        raise RunError(f"{problem.path}: {problem.message}")
