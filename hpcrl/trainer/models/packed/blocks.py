"""A forward pass in blocks of tokens, for trainer and embedded engine alike: the numbers of a token do not depend on what is computed beside it.

Matrix products and attention kernels sum in another order for matrices of another size. So each product is of one block of rows, and each
sample begins a block of its own. The token at place p is row p mod BLOCK of its product. That holds in a trainer's batch, an engine's prompt
and for the newest token alike (batch invariance: H. He, Thinking Machines, "Defeating Nondeterminism in LLM Inference", 2025).
Attention is computed for the queries of a block, with the keys up to its end.
Everything else is computed by row. It has rows in multiples of a block, because vector instructions leave a remainder to others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear, pad

from hpcrl.trainer.models.packed.kernels import AttentionKind, last_tokens

BLOCK = 32
"""Tokens of a block: a multiple of what two vector registers hold."""


def rounded_up(tokens: int) -> int:
    """Return the tokens of whole blocks that hold so many."""
    return -(-tokens // BLOCK) * BLOCK


def compute_in_blocks(model: nn.Module) -> None:
    """Let linear layers of a model compute a block of rows at a time.

    Args:
        model: may be on the meta device; its modules and parameters stay the same.
    """
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = BlockLinear


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute by one thread for a while: sums and remainders are divided among threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class BlockLinear(nn.Linear):
    """A linear layer that multiplies a block of rows at a time."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        found: Any = _Blocks.apply(input, self.weight, self.bias)
        return found


class _Blocks(torch.autograd.Function):
    """A product by blocks; its gradients are products of all rows, which nobody compares with an engine's."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        rows_RK = input.flatten(0, -2)
        missing = rounded_up(len(rows_RK)) - len(rows_RK)
        blocks = pad(rows_RK, (0, 0, 0, missing)).split(BLOCK)
        found_RN = torch.cat([linear(block, weight, bias) for block in blocks])[: len(rows_RK)]
        return found_RN.view(*input.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (gradient,), (input, weight) = gradients, ctx.saved_tensors
        of_input, of_weight, of_bias = ctx.needs_input_grad
        rows_RN = gradient.flatten(0, -2)
        return (
            gradient @ weight if of_input else None,
            rows_RN.T @ input.flatten(0, -2) if of_weight else None,
            rows_RN.sum(0) if of_bias else None,
        )


def attend_in_blocks(
    query_QHD: torch.Tensor, key_KHD: torch.Tensor, value_KHD: torch.Tensor, kind: AttentionKind
) -> torch.Tensor:
    """Return the attention output [Q, H, D] for the last Q tokens of K of a sample, both whole blocks."""
    heads = (heads_THD[None].transpose(1, 2) for heads_THD in (query_QHD, key_KHD, value_KHD))
    query, key, value = heads
    before, outputs = key.shape[2] - query.shape[2], list[torch.Tensor]()
    for first in range(0, query.shape[2], BLOCK):
        end = before + first + BLOCK
        # in memory of its own: kernels may choose by strides
        keys, values = key[:, :, :end].contiguous(), value[:, :, :end].contiguous()
        outputs.append(last_tokens(query[:, :, first : first + BLOCK].contiguous(), keys, values, kind))
    return torch.cat(outputs, 2)[0].transpose(0, 1)


class NewestBlocks:
    """Attention of the last blocks of one sample, whose earlier keys are cached."""

    def attend(
        self, query_QHD: torch.Tensor, key_KHD: torch.Tensor, value_KHD: torch.Tensor, kind: AttentionKind
    ) -> torch.Tensor:
        return attend_in_blocks(query_QHD, key_KHD, value_KHD, kind)


@dataclass(frozen=True)
class SampleBlocks:
    """Samples that lie end to end, P tokens, each computed in blocks of its own, D tokens: `Packed` of attention.py.

    Attributes:
        lengths: tokens of each sample.
        cu_seqlens: [B + 1] int32, cumulative lengths from 0.
        places: [P] int64, of each token among those that are computed.
    """

    lengths: Sequence[int]
    cu_seqlens: torch.Tensor
    places: torch.Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], cu_seqlens: torch.Tensor) -> SampleBlocks:
        """Return it on the device of `cu_seqlens`."""
        begins = [0, *accumulate(map(rounded_up, lengths))]
        places = [torch.arange(begin, begin + length) for begin, length in zip(begins, lengths, strict=False)]
        return cls(lengths, cu_seqlens, torch.cat(places).to(cu_seqlens.device))

    @property
    def max_seqlen(self) -> int:
        return max(self.lengths)

    @property
    def tokens(self) -> int:
        return sum(map(rounded_up, self.lengths))

    def computed(self, values_P: torch.Tensor) -> torch.Tensor:
        """Return [D, ...] of [P, ...], with zeros behind each sample."""
        return values_P.new_zeros(self.tokens, *values_P.shape[1:]).index_copy(0, self.places, values_P)

    def spread(self, values_D: torch.Tensor, at_R: torch.Tensor | None = None) -> torch.Tensor:
        """Return [R, ...] of [D, ...]: the entries of these of the P tokens, or of all."""
        return values_D.index_select(0, self.places if at_R is None else self.places[at_R])

    def attend(
        self, query_DHN: torch.Tensor, key_DHN: torch.Tensor, value_DHN: torch.Tensor, kind: AttentionKind
    ) -> torch.Tensor:
        """Return the attention output [D, H, N], causal within each sample."""
        sizes = list(map(rounded_up, self.lengths))
        samples = zip(*(heads_DHN.split(sizes) for heads_DHN in (query_DHN, key_DHN, value_DHN)), strict=True)
        return torch.cat([attend_in_blocks(query, key, value, kind) for query, key, value in samples])
