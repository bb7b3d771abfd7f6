"""A teacher on Megatron-core: tensor, pipeline, sequence and expert parallel ranks share one copy of it, which only computes log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from hpcrl.config.sections.megatron import MegatronModelConfig
from hpcrl.config.sections.trainer import TrainerConfig
from hpcrl.trainer.backends.megatron.engine import build
from hpcrl.trainer.backends.megatron.models import PolicyModel
from hpcrl.trainer.backends.megatron.pipeline import Pipeline
from hpcrl.trainer.distributed import World
from hpcrl.trainer.models.forward import ForwardConfig
from hpcrl.trainer.models.hf import ModelSource
from hpcrl.trainer.packing import MicroBatchStream

Logprobs = Callable[[MicroBatchStream], Iterator[torch.Tensor]]
"""Yields the log-probabilities of the labels of each micro-batch, [P], on all ranks that share its samples."""


def megatron_teacher(
    trainer: TrainerConfig, layout: MegatronModelConfig, source: ModelSource, forward: ForwardConfig, world: World
) -> tuple[Logprobs, World]:
    """Return what computes, and the ranks that score other samples than this one.

    Raises:
        DataError: there is no such model, or Megatron-core cannot be it.
    """
    chunks, _, data = build(PolicyModel, source, forward, layout, "trainer.distillation", trainer, world)
    for chunk in chunks:
        chunk.requires_grad_(False)
    return Pipeline(chunks, data, dynamic=layout.pipeline_dynamic_shape).first_output, data
