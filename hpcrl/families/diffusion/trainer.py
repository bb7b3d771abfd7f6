"""Training of pipelines: its functions are those of hpcrl.trainer.family.TrainerFamily."""

from __future__ import annotations

from hpcrl.config import Config
from hpcrl.families.diffusion.model import diffusion_flops
from hpcrl.families.diffusion.objective import diffusion_objective
from hpcrl.families.diffusion.policy import DiffusionPolicy
from hpcrl.trainer.backends.base import Objective, PolicyEngine
from hpcrl.trainer.backends.build import require_packages
from hpcrl.trainer.distributed import World
from hpcrl.trainer.models.flops import ModelFlops
from hpcrl.trainer.offline.build import objective_of


def load_policy(config: Config, world: World) -> PolicyEngine:
    require_packages(config.trainer)
    return DiffusionPolicy(config.trainer, world)


def objective(config: Config) -> Objective:
    return diffusion_objective(config.trainer) if config.trainer.mode == "rl" else objective_of(config.trainer)


def flops(config: Config) -> ModelFlops:
    return diffusion_flops(config.trainer)
