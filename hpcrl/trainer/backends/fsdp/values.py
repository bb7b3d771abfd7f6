"""Models on FSDP2 with scalar outputs: critics, and reward models in training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from hpcrl.config.sections.trainer import TrainerConfig
from hpcrl.trainer.backends.base import MicroBatches
from hpcrl.trainer.backends.fsdp.engine import FsdpEngine, FsdpExported
from hpcrl.trainer.backends.fsdp.model import PackedCritic, PackedRewardModel, load_model
from hpcrl.trainer.distributed import World
from hpcrl.trainer.models.build import critic_source, forward_config, policy_source
from hpcrl.trainer.models.layers.choice import Kernels


class FsdpRewardModel(FsdpExported[PackedRewardModel]):
    """A reward model in training, on FSDP2: it has `values` as a critic, and is exported as a policy."""

    def __init__(self, trainer: TrainerConfig, world: World) -> None:
        section, forward, source = trainer.policy, forward_config(trainer), policy_source(trainer)
        data = world.sharing(section.sequence_parallel_size)
        forward = replace(forward, experts=section.experts)
        model = load_model(
            PackedRewardModel, source, section.fsdp_config, forward, world,
            trained=section, seed=trainer.seed, kernels=Kernels.of(section), data=data,
        )  # fmt: skip
        super().__init__(model, source, section, trainer.recomputation, world)

    def values(self, batches: MicroBatches) -> Iterator[torch.Tensor]:
        return (values_P for values_P, *_ in self._each_without_gradient(self._model, batches))


class FsdpCritic(FsdpEngine[PackedCritic]):
    """CriticEngine on FSDP2."""

    def __init__(self, trainer: TrainerConfig, world: World) -> None:
        section, forward = trainer.critic, forward_config(trainer)
        data = world.sharing(trainer.critic_model_parallel_size)
        model = load_model(
            PackedCritic, critic_source(trainer), section.fsdp_config, forward, world,
            trained=section, seed=trainer.seed, data=data,
        )  # fmt: skip
        super().__init__(model, section, trainer.recomputation, world)

    def values(self, batches: MicroBatches) -> Iterator[torch.Tensor]:
        return (values_P for values_P, *_ in self._each_without_gradient(self._model, batches))
