"""Samples for the tests of losses: logged log-probabilities, advantages and masks of a mini-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hpcrl.algorithms.losses import LossTokens
from hpcrl.algorithms.reductions import Reduction, TokenCounts, row_weight
from hpcrl.config import AlgorithmConfig
from hpcrl.config.validate import build
from hpcrl.trainer.loss import build_objective
from hpcrl.types import MicroBatch


@dataclass
class Sample:
    """One sample: [T] tensors, one entry per token."""

    group: int
    reward: float
    logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    rollout_logprobs: torch.Tensor
    ref_logprobs: torch.Tensor
    advantages: torch.Tensor
    entropies: torch.Tensor
    mask: torch.Tensor


def make_samples(lengths: Sequence[int] = (5, 1, 7, 3, 4, 6), seed: int = 0, spread: float = 0.3) -> list[Sample]:
    """Return samples in groups of two; the fourth has no trained token, others have masked ones inside."""
    generator = torch.Generator().manual_seed(seed)

    def noise(length: int) -> torch.Tensor:
        return torch.randn(length, generator=generator, dtype=torch.float64) * spread

    samples = []
    for number, length in enumerate(lengths):
        logprobs = -0.1 - torch.rand(length, generator=generator, dtype=torch.float64) * 3
        advantage = torch.randn((), generator=generator, dtype=torch.float64).item()
        mask = torch.ones(length, dtype=torch.float64)
        mask[1:3:2] = 0
        others = [logprobs + noise(length) for _ in range(3)]
        mask = torch.zeros_like(mask) if number == 3 else mask
        advantages = torch.full_like(logprobs, advantage)
        entropies = torch.rand(length, generator=generator, dtype=torch.float64)
        samples.append(Sample(number // 2, advantage, logprobs, *others, advantages, entropies, mask))
    return samples


def joined(samples: Sequence[Sample], name: str) -> torch.Tensor:
    return torch.cat([getattr(sample, name) for sample in samples])


def tokens_of(samples: Sequence[Sample], logprobs: torch.Tensor | None = None) -> LossTokens:
    names = ("old_logprobs", "rollout_logprobs", "advantages", "mask")
    first = joined(samples, "logprobs") if logprobs is None else logprobs
    return LossTokens(
        first, *(joined(samples, name) for name in names), torch.tensor([len(sample.mask) for sample in samples])
    )


def weights_of(samples: Sequence[Sample], reduction: Reduction) -> list[float]:
    """Return the weight of each sample of a mini-batch, whose micro-batches are two samples each, as they come."""
    lengths = [int(sample.mask.sum()) for sample in samples]
    size = 2
    return [
        row_weight(
            reduction,
            TokenCounts(
                length=lengths[at],
                tokens=sum(lengths),
                rows=len(samples),
                groups=len({other.group for other in samples}),
                group_tokens=sum(n for n, other in zip(lengths, samples, strict=True) if other.group == sample.group),
                micro_tokens=sum(lengths[at - at % size : at - at % size + size]),
                micro_batches=-(-len(samples) // size),
            ),
        )
        for at, sample in enumerate(samples)
    ]


def micro_batch(samples: Sequence[Sample], weights: Sequence[float], nll_weights: Sequence[float]) -> MicroBatch:
    lengths = [len(sample.mask) for sample in samples]
    counts, mask = torch.tensor(lengths), joined(samples, "mask")
    ids = torch.zeros(sum(lengths), dtype=torch.int64)
    return MicroBatch(
        token_ids=ids,
        positions=ids,
        lengths=lengths,
        labels=ids,
        loss_mask=mask,
        weights=mask * torch.tensor(weights, dtype=torch.float64).repeat_interleave(counts),
        nll_weights=mask * torch.tensor(nll_weights, dtype=torch.float64).repeat_interleave(counts),
        rollout_logprobs=joined(samples, "rollout_logprobs"),
        advantages=joined(samples, "advantages"),
        old_logprobs=joined(samples, "old_logprobs"),
        ref_logprobs=joined(samples, "ref_logprobs"),
    )


def run(
    samples: Sequence[Sample], algorithm: dict[str, Any], reduction: Reduction, order: Sequence[Sequence[int]]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the loss of a mini-batch and its gradient per sample, from micro-batches of these samples.

    Args:
        order: the samples of each micro-batch, by number; of all ranks.
    """
    objective = build_objective(build(AlgorithmConfig, algorithm))
    weights = weights_of(samples, reduction)
    positive = sum(int(sample.mask.sum()) for sample in samples if sample.reward > 0)
    likelihood = [1 / positive if positive and sample.reward > 0 else 0.0 for sample in samples]
    leaves = [sample.logprobs.clone().requires_grad_() for sample in samples]
    total = torch.zeros((), dtype=torch.float64)
    for numbers in order:
        chosen = [samples[number] for number in numbers]
        batch = micro_batch(chosen, [weights[n] for n in numbers], [likelihood[n] for n in numbers])
        loss, _ = objective(batch, torch.cat([leaves[n] for n in numbers]), joined(chosen, "entropies"))
        loss.backward()
        total += loss.detach()
    return total, [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves]
