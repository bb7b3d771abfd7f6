"""A teacher on Megatron-core: tensor, pipeline, sequence and expert parallel ranks share one copy of it, which only computes log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from hpcrl.config.sections.megatron import MegatronModelConfig
from hpcrl.config.sections.trainer import TrainerConfig
from hpcrl.trainer.backends.megatron.engine import build
from hpcrl.trainer.backends.megatron.models import PolicyModel
from hpcrl.trainer.backends.megatron.pipeline import Pipeline, top_columns
from hpcrl.trainer.distributed import World
from hpcrl.trainer.models.forward import ForwardConfig
from hpcrl.trainer.models.hf import ModelSource
from hpcrl.trainer.packing import MicroBatchStream

Passes = Callable[[MicroBatchStream], Iterator[tuple[torch.Tensor, ...]]]
"""Yields of each micro-batch, on all ranks that share its samples, the log-probabilities of its labels [P], and where it asks for `top_k` also ids
and log-probabilities of the most probable tokens [P, K]."""


def forward_passes(
    trainer: TrainerConfig,
    layout: MegatronModelConfig,
    source: ModelSource,
    forward: ForwardConfig,
    role: str,
    world: World,
) -> tuple[Passes, World]:
    """Return what computes, and the ranks that score other samples than this one.

    Args:
        layout: how ranks share the model.
        role: its section, for errors.
    """
    chunks, _, data = build(PolicyModel, source, forward, layout, role, trainer, world)
    for chunk in chunks:
        chunk.requires_grad_(False)
    pipeline = Pipeline(chunks, data, dynamic=layout.pipeline_dynamic_shape)

    def passes(batches: MicroBatchStream) -> Iterator[tuple[torch.Tensor, ...]]:
        if batches.top_k:
            return map(top_columns, pipeline.top_outputs(batches))
        return ((logprobs_P,) for logprobs_P in pipeline.first_output(batches))

    return passes, data
