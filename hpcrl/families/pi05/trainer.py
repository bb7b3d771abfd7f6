"""Training of PI0.5: its functions are those of hpcrl.trainer.family.TrainerFamily."""

from __future__ import annotations

from hpcrl.config import Config
from hpcrl.families.pi05.policy import ActionPolicy, action_flops
from hpcrl.trainer.backends.base import Objective, PolicyEngine
from hpcrl.trainer.backends.build import require_packages
from hpcrl.trainer.distributed import World
from hpcrl.trainer.models.flops import ModelFlops
from hpcrl.trainer.offline.build import objective_of


def load_policy(config: Config, world: World) -> PolicyEngine:
    require_packages(config.trainer)
    return ActionPolicy(config.trainer, world, config.vla.pi05)


def objective(config: Config) -> Objective:
    return objective_of(config.trainer)


def flops(config: Config) -> ModelFlops:
    return action_flops(config.trainer, config.vla.pi05)
