"""The configured backend, behind the verbs of hpcrl/trainer/engine.py."""

from __future__ import annotations

from hpcrl.config.derive import ref_model_path
from hpcrl.config.trainer import TrainerConfig
from hpcrl.trainer.engine import Engine
from hpcrl.trainer.fsdp import FsdpEngine
from hpcrl.trainer.world import World

BACKENDS: dict[str, type[FsdpEngine]] = {"fsdp2": FsdpEngine}


def build_engine(trainer: TrainerConfig, temperature: float, world: World) -> Engine:
    """Load the policy, and the reference if the loss has a KL term.

    Raises:
        DataError: a model path holds no model.
    """
    reference = ref_model_path(trainer) if trainer.algorithm.use_kl_loss else None
    return BACKENDS[trainer.strategy](
        trainer.policy,
        world,
        reference_path=reference,
        temperature=temperature,
        chunk_rows=trainer.logprobs_chunk_size,
        gradient_checkpointing=trainer.gradient_checkpointing,
    )
