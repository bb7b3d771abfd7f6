"""The configured backend, behind the verbs of hpcrl/trainer/engine.py."""

from __future__ import annotations

from hpcrl.config.trainer import TrainerConfig
from hpcrl.trainer.engine import Engine
from hpcrl.trainer.fsdp import FsdpEngine
from hpcrl.trainer.world import World

BACKENDS: dict[str, type[FsdpEngine]] = {"fsdp2": FsdpEngine}


def build_engine(trainer: TrainerConfig, temperature: float, world: World) -> Engine:
    """Load the policy, and the reference if the loss has a KL term.

    Raises:
        DataError: a model path holds no model, or the model does not have what the configuration names.
    """
    return BACKENDS[trainer.strategy](trainer, temperature, world)
