"""Training of language models: its functions are those of hpcrl.trainer.family.TrainerFamily."""

from __future__ import annotations

import torch

from hpcrl.config import Config
from hpcrl.trainer.backends.base import Objective, PolicyEngine
from hpcrl.trainer.backends.build import build_policy
from hpcrl.trainer.distributed import World
from hpcrl.trainer.models.build import policy_source
from hpcrl.trainer.models.flops import ModelFlops
from hpcrl.trainer.models.packed.attention import PACKED
from hpcrl.trainer.models.trainable import mark_trained
from hpcrl.trainer.offline.build import objective_of


def load_policy(config: Config, world: World) -> PolicyEngine:
    return build_policy(config.trainer, config.temperature, world)


def objective(config: Config) -> Objective:
    return objective_of(config.trainer)


def flops(config: Config) -> ModelFlops:
    model = policy_source(config.trainer).empty(torch.float32, PACKED)
    mark_trained(model, config.trainer.policy, torch.float32)
    return ModelFlops.of(model)
