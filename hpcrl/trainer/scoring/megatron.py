"""A teacher on Megatron-core: tensor, pipeline, sequence and expert parallel ranks share one copy, and compute log-probabilities only."""

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
"""Yields the labels' log-probabilities [P] of each micro-batch; with `top_k` also ids and log-probabilities of the most probable tokens [P,
K]."""


def forward_passes(
    trainer: TrainerConfig,
    layout: MegatronModelConfig,
    source: ModelSource,
    forward: ForwardConfig,
    role: str,
    world: World,
) -> tuple[Passes, World]:
    """Return the forward passes, and the data-parallel ranks.

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
