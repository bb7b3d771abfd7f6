"""How the losses of the tokens of a mini-batch become one number: a weight per row, equal for all its trained tokens.

The loss of a mini-batch is the sum, over all ranks and micro-batches, of weight x loss over the trained tokens. The weights are
worked out once, from the token counts of the whole mini-batch, so that nothing depends on packing, micro-batches or ranks.
A row without a trained token counts among the rows of a mean, and adds 0 to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Reduction:
    """A reduction by its name in trainer.algorithm.loss_reduction, and its divisor.

    Attributes:
        max_seq_len: divisor of seq_mean_token_sum_norm, in tokens.
        max_tokens: divisor of seq_mean_token_mean, in tokens, instead of each row's own length (Dr.GRPO, arXiv:2503.20783).
    """

    name: str = "token_mean"
    max_seq_len: int | None = None
    max_tokens: int | None = None


@dataclass(frozen=True)
class TokenCounts:
    """What the weight of a row depends on.

    Attributes:
        length: trained tokens of the row.
        tokens, rows, groups: of the mini-batch, over all ranks.
        group_tokens: trained tokens of the row's group.
        micro_tokens: trained tokens of the row's micro-batch.
        micro_batches: of the mini-batch, over all ranks.
    """

    length: int
    tokens: int
    rows: int
    groups: int
    group_tokens: int
    micro_tokens: int
    micro_batches: int


def row_weight(reduction: Reduction, counts: TokenCounts) -> float:
    """Return the weight of each trained token of a row.

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
            return 1 / (counts.rows * max(counts.length, 1))
        case "seq_mean_token_mean":
            return 1 / (counts.rows * (reduction.max_tokens or max(counts.length, 1)))
        case "seq_mean_token_sum":
            return 1 / counts.rows
        case "seq_mean_token_sum_norm":
            assert reduction.max_seq_len, "seq_mean_token_sum_norm divides by max_seq_len"
            return 1 / (counts.rows * reduction.max_seq_len)
        case "prompt_mean":
            return 1 / (counts.groups * max(counts.group_tokens, 1))
    raise AssertionError(f"no reduction {reduction.name}")


def weighted_sum(values_P: torch.Tensor, weights_P: torch.Tensor) -> torch.Tensor:
    """Return the sum of value x weight where the weight is not 0; a NaN elsewhere does no harm."""
    return torch.where(weights_P != 0, values_P * weights_P, 0.0).sum()
