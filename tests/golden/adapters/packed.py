"""A mini-batch of golden cases: samples laid end to end, weighed and run through the trainer's objective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hpcrl.algorithms.reductions import Reduction, TokenCounts, row_weight
from hpcrl.config import AlgorithmConfig
from hpcrl.trainer.backends.base import merge
from hpcrl.trainer.loss import build_objective
from hpcrl.types import MicroBatch

WHOLE = 10**6  # samples of a micro-batch: all


def sample_weights(reduction: Reduction, trained: Sequence[int], size: int = WHOLE) -> list[float]:
    """Return the weight of each sample of a mini-batch, from its trained tokens; each is a group of its own.

    Args:
        size: samples of a micro-batch.
    """
    return [
        row_weight(
            reduction,
            TokenCounts(
                length=length,
                tokens=sum(trained),
                rows=len(trained),
                groups=len(trained),
                group_tokens=length,
                micro_tokens=sum(trained[at - at % size : at - at % size + size]),
                micro_batches=-(-len(trained) // size),
            ),
        )
        for at, length in enumerate(trained)
    ]


def train(
    algorithm: AlgorithmConfig,
    reduction: Reduction,
    samples: Sequence[Mapping[str, torch.Tensor]],
    size: int = WHOLE,
) -> tuple[dict[str, float], torch.Tensor]:
    """Return the metric sums of a mini-batch and the gradient by all its log-probabilities.

    Args:
        samples: [T] tensors logprobs, old, mask, and maybe rollout, reference and advantages.
        size: samples of a micro-batch.
    """
    objective = build_objective(algorithm)
    weights = sample_weights(reduction, [int(sample["mask"].sum()) for sample in samples], size)
    leaves = [sample["logprobs"].clone().requires_grad_() for sample in samples]
    totals: dict[str, torch.Tensor] = {}
    for start in range(0, len(samples), size):
        numbers = range(start, min(start + size, len(samples)))
        chosen = [samples[number] for number in numbers]
        lengths = [len(sample["mask"]) for sample in chosen]

        def joined(name: str, otherwise: str, of: Any = chosen) -> torch.Tensor:
            return torch.cat([sample.get(name, sample[otherwise]) for sample in of])

        mask_P = joined("mask", "mask")
        spread_P = torch.tensor([weights[number] for number in numbers]).repeat_interleave(torch.tensor(lengths))
        ids_P = torch.zeros(len(mask_P), dtype=torch.int64)
        batch = MicroBatch(
            token_ids=ids_P,
            positions=ids_P,
            lengths=lengths,
            labels=ids_P,
            loss_mask=mask_P,
            weights=mask_P * spread_P,
            nll_weights=torch.zeros_like(mask_P),
            rollout_logprobs=joined("rollout", "old"),
            advantages=joined("advantages", "zeros"),
            old_logprobs=joined("old", "logprobs"),
            ref_logprobs=joined("reference", "old"),
        )
        loss, sums = objective(batch, torch.cat([leaves[number] for number in numbers]), torch.zeros(len(mask_P)))
        loss.backward()
        merge(totals, sums)
    gradient = torch.cat([torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves])
    return {name: value.item() for name, value in totals.items()}, gradient
