"""How the losses of the tokens of a mini-batch become one number: a weight per sample, equal for all its trained tokens.

The loss of a mini-batch is the sum, over all ranks and micro-batches, of weight x loss over the trained tokens. The weights are
worked out once, from the token counts of the whole mini-batch, so that nothing depends on packing, micro-batches or ranks.
A sample without a trained token counts among the samples of a mean, and adds 0 to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Reduction:
    """A reduction by its name in trainer.algorithm.loss_reduction, and its divisor.

    Attributes:
        max_seq_len: divisor of seq_mean_token_sum_norm, in tokens.
        max_tokens: divisor of seq_mean_token_mean, in tokens, instead of each sample's own length (Dr.GRPO, arXiv:2503.20783).
    """

    name: str = "token_mean"
    max_seq_len: int | None = None
    max_tokens: int | None = None


@dataclass(frozen=True)
class Counts:
    """What the weight of a sample depends on.

    Attributes:
        length: trained tokens of the sample.
        tokens, samples, groups: of the mini-batch, over all ranks.
        group_tokens: trained tokens of the sample's group.
        micro_tokens: trained tokens of the sample's micro-batch.
        micro_batches: of the mini-batch, over all ranks.
    """

    length: int
    tokens: int
    samples: int
    groups: int
    group_tokens: int
    micro_tokens: int
    micro_batches: int


def sample_weight(reduction: Reduction, counts: Counts) -> float:
    """Return the weight of each trained token of a sample.

    token_mean_legacy, the mean over micro-batches of means over their tokens, is the one that depends on micro-batches.
    """
    match reduction.name:
        case "token_mean":
            return 1 / max(counts.tokens, 1)
        case "token_mean_legacy":
            return 1 / (counts.micro_batches * max(counts.micro_tokens, 1))
        case "token_sum":
            return 1.0
        case "sequence_mean":
            return 1 / (counts.samples * max(counts.length, 1))
        case "seq_mean_token_mean":
            return 1 / (counts.samples * (reduction.max_tokens or max(counts.length, 1)))
        case "seq_mean_token_sum":
            return 1 / counts.samples
        case "seq_mean_token_sum_norm":
            assert reduction.max_seq_len, "seq_mean_token_sum_norm divides by max_seq_len"
            return 1 / (counts.samples * reduction.max_seq_len)
        case "prompt_mean":
            return 1 / (counts.groups * max(counts.group_tokens, 1))
    raise AssertionError(f"no reduction {reduction.name}")


def weighted_sum(values_P: torch.Tensor, weights_P: torch.Tensor) -> torch.Tensor:
    """Return the sum of value x weight where the weight is not 0; a NaN elsewhere does no harm."""
    return torch.where(weights_P != 0, values_P * weights_P, 0.0).sum()
