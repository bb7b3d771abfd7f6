"""How models are passed through, in training and in scoring."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hpcrl.config.trainer import TrainerConfig
from hpcrl.trainer.sharding import DTYPES


@dataclass(frozen=True, kw_only=True)
class Passes:
    """How forward passes are made.

    Attributes:
        temperature: divides the logits.
        chunk_rows: tokens whose logits exist at the same time.
        packing: samples lie end to end; otherwise each is a padded row.
        flash: flash attention is used where there is one.
        compiled: log-probabilities and entropies are computed by compiled code.
        dtype: in which logits become log-probabilities.
    """

    temperature: float
    chunk_rows: int
    packing: bool = True
    flash: bool = True
    compiled: bool = False
    dtype: torch.dtype = torch.float32


def passes_of(trainer: TrainerConfig, temperature: float = 1.0) -> Passes:
    """Return how the configuration has passes made."""
    return Passes(
        temperature=temperature,
        chunk_rows=trainer.logprobs_chunk_size,
        packing=trainer.use_sample_packing,
        flash=trainer.flash_attn,
        compiled=trainer.policy.use_torch_compile,
        dtype=DTYPES[trainer.algorithm.logprob_dtype],
    )
