"""The configured backend, behind the verbs of hpcrl/trainer/engine.py."""

from __future__ import annotations

from hpcrl.config.trainer import TrainerConfig
from hpcrl.trainer.engine import CriticEngine, PolicyEngine
from hpcrl.trainer.fsdp import FsdpCritic, FsdpPolicy
from hpcrl.trainer.world import World

POLICIES: dict[str, type[FsdpPolicy]] = {"fsdp2": FsdpPolicy}
CRITICS: dict[str, type[FsdpCritic]] = {"fsdp2": FsdpCritic}


def build_policy(trainer: TrainerConfig, temperature: float, world: World) -> PolicyEngine:
    """Load the policy, and the reference if anything compares with it.

    Raises:
        DataError: a model path holds no model, or the model does not have what the configuration names.
    """
    return POLICIES[trainer.strategy](trainer, temperature, world)


def build_critic(trainer: TrainerConfig, world: World) -> CriticEngine | None:
    """Load the critic; None where the configuration names none.

    Raises:
        DataError: the path holds no model, or the model does not have what the configuration names.
    """
    return None if trainer.critic.model.path is None else CRITICS[trainer.strategy](trainer, world)
