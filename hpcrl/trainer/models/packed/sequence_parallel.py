"""Ranks that share the tokens of packed samples, and the heads of their attention: Ulysses (S. A. Jacobs et al., arXiv:2309.14509).

Of S ranks, rank r computes the tokens r, r + S, r + 2S and so on: all ranks have as many. They also have nearly as many answer tokens, for
which the head computes log-probabilities. All layers but attention take tokens one by one. For attention, ranks exchange tokens against
heads: each then has all tokens for its share of the query heads, and computes what one rank alone would. A second exchange gives each its
tokens back.

    [T, H, N] on each rank  --all-to-all-->  [D, h, N]  --attention-->  [D, h, N]  --all-to-all-->  [T, H, N]

Where heads cannot be shared equally, some ranks have one more than others. A head of keys and values goes to each rank that has query heads of
it. So any number of ranks up to that of the query heads works, and rings, which pass keys and values on, are not needed.

Letters beside those of the project: D tokens of all ranks, T of one rank, H heads of the model, h of one rank, N numbers of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from hpcrl.config.rules.model_fit import HeadShare
from hpcrl.trainer.models.packed.attention import Packed
from hpcrl.trainer.models.packed.kernels import AttentionKind
from hpcrl.trainer.models.packed.tree import gathered
from hpcrl.types import MicroBatch


def fitted(heads_DhN: torch.Tensor, times: list[int]) -> torch.Tensor:
    """Return keys or values as attention takes them: where some have more query heads than others, once for each of those.

    Args:
        times: of each of them, as HeadShare has it.
    """
    if len(set(times)) == 1:
        return heads_DhN
    return torch.cat([one.expand(-1, count, -1) for one, count in zip(heads_DhN.split(1, 1), times, strict=True)], 1)


@dataclass(frozen=True)
class SharedTokens:
    """Packed samples of which this rank computes some tokens.

    Attributes:
        samples: all of them.
        ranks: that share them.
    """

    samples: Packed
    ranks: dist.ProcessGroup

    @property
    def lengths(self) -> Sequence[int]:
        return self.samples.lengths

    @property
    def cu_seqlens(self) -> torch.Tensor:
        return self.samples.cu_seqlens

    @property
    def max_seqlen(self) -> int:
        return self.samples.max_seqlen

    @property
    def tokens(self) -> int:
        """How many tokens this rank computes; the last one may be padding, which depends on nothing and counts for nothing."""
        return -(-self.samples.tokens // self.ranks.size())

    def computed(self, values_P: torch.Tensor) -> torch.Tensor:
        """Return [T, ...] of [P, ...]: the entries of this rank's tokens; 0 for padding."""
        return self._filled(self.samples.computed(values_P))[self.ranks.rank() :: self.ranks.size()]

    def spread(self, values_T: torch.Tensor, at_R: torch.Tensor | None = None) -> torch.Tensor:
        """Return [R, ...] of [T, ...]: the entries of these of the P tokens, or of all; 0 where another rank computes them."""
        size, every_D = self.ranks.size(), torch.arange(self.samples.tokens, device=values_T.device)
        places_R = self.samples.spread(every_D, at_R)
        own_R = (places_R % size == self.ranks.rank()).view(-1, *[1] * (values_T.ndim - 1))
        return torch.where(own_R, gathered(values_T, places_R // size), 0)

    def attend(
        self, query_THN: torch.Tensor, key_THN: torch.Tensor, value_THN: torch.Tensor, kind: AttentionKind
    ) -> torch.Tensor:
        """Return the attention output [T, H, N], causal within each whole sample; there may be fewer heads in key and value."""
        shares = HeadShare.of(query_THN.shape[1], key_THN.shape[1], self.ranks.size())
        queries, keys = [share.queries for share in shares], [share.keys for share in shares]
        times = shares[self.ranks.rank()].times
        query_DhN, key_DhN, value_DhN = (
            to_heads(heads_THN, parts, self.ranks)[: self.samples.tokens]
            for heads_THN, parts in ((query_THN, queries), (key_THN, keys), (value_THN, keys))
        )
        if kind.sinks is not None:
            own = queries[self.ranks.rank()]
            kind = replace(kind, sinks=kind.sinks[own.start : own.stop])
        output_DhN = self.samples.attend(query_DhN, fitted(key_DhN, times), fitted(value_DhN, times), kind)
        return to_tokens(self._filled(output_DhN), queries, self.ranks)

    def _filled(self, values_D: torch.Tensor) -> torch.Tensor:
        """Return tensors padded with zeros to the same length on all ranks."""
        missing = self.tokens * self.ranks.size() - len(values_D)
        return pad(values_D, (0, 0) * (values_D.ndim - 1) + (0, missing)) if missing else values_D


def own_rows(batch: MicroBatch, ranks: dist.ProcessGroup) -> torch.Tensor:
    """Return `head_rows` of which this rank has the hidden states, [R] int64.

    Args:
        batch: on the CPU, so that nothing waits for the device.
    """
    rows_R = batch.head_rows
    places_R = rows_R if batch.prefixes is None else batch.prefixes.places[rows_R]
    return rows_R[places_R % ranks.size() == ranks.rank()]


def to_heads(heads_THN: torch.Tensor, parts: list[range], ranks: dist.ProcessGroup) -> torch.Tensor:
    """Return [S T, h, N], for this rank's heads the tokens of all ranks in their order. All ranks call it.

    Args:
        heads_THN: for all heads, this rank's tokens.
        parts: heads of each rank, which may overlap; together all of them.
    """
    found: Any = _ToHeads.apply(heads_THN, parts, ranks)
    return found


def to_tokens(heads_GhN: torch.Tensor, parts: list[range], ranks: dist.ProcessGroup) -> torch.Tensor:
    """Return [T, H, N] of [S T, h, N]: what `to_heads` was given for what it returned, sums of what several ranks have. All ranks call it."""
    found: Any = _ToTokens.apply(heads_GhN, parts, ranks)
    return found


def _to_heads(heads_THN: torch.Tensor, parts: list[range], ranks: dist.ProcessGroup) -> torch.Tensor:
    size, own = ranks.size(), len(parts[ranks.rank()])
    heads_HTN = heads_THN.transpose(0, 1)
    sent = torch.cat([heads_HTN[part.start : part.stop] for part in parts])
    found = sent.new_empty(size * own, *sent.shape[1:])
    dist.all_to_all_single(found, sent, [own] * size, list(map(len, parts)), group=ranks)
    return found.unflatten(0, (size, own)).permute(2, 0, 1, 3).flatten(0, 1)


def _to_tokens(heads_GhN: torch.Tensor, parts: list[range], ranks: dist.ProcessGroup) -> torch.Tensor:
    size, counts = ranks.size(), list(map(len, parts))
    sent = heads_GhN.unflatten(0, (-1, size)).permute(1, 2, 0, 3).flatten(0, 1).contiguous()
    found = sent.new_empty(sum(counts), *sent.shape[1:])
    dist.all_to_all_single(found, sent, counts, [counts[ranks.rank()]] * size, group=ranks)
    heads = parts[-1].stop
    if sum(counts) > heads:  # gradients of keys that several ranks have: added up in float32 and rounded once
        total = found.new_zeros(heads, *found.shape[1:], dtype=torch.promote_types(found.dtype, torch.float32))
        for part, piece in zip(parts, found.split(counts), strict=True):
            total[part.start : part.stop] += piece
        found = total.to(found.dtype)
    return found.transpose(0, 1)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads_THN: torch.Tensor, parts: list[range], ranks: dist.ProcessGroup) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.parts, ctx.ranks = parts, ranks
        return _to_heads(heads_THN, parts, ranks)

    @staticmethod
    def backward(ctx: Any, gradient_GhN: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _to_tokens(gradient_GhN, ctx.parts, ctx.ranks), None, None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads_GhN: torch.Tensor, parts: list[range], ranks: dist.ProcessGroup) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.parts, ctx.ranks = parts, ranks
        return _to_tokens(heads_GhN, parts, ranks)

    @staticmethod
    def backward(ctx: Any, gradient_THN: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _to_heads(gradient_THN, ctx.parts, ctx.ranks), None, None


def of_all(values_P: torch.Tensor, ranks: dist.ProcessGroup) -> torch.Tensor:
    """Return [P, ...] on every rank, from each rank's own entries and 0 elsewhere.

    What follows is the same on all ranks, so that each keeps the gradient of its own part.
    """
    found: Any = _OfAll.apply(values_P, ranks)
    return found


class _OfAll(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, values_P: torch.Tensor, ranks: dist.ProcessGroup) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        found = values_P.clone()
        dist.all_reduce(found, group=ranks)
        return found

    @staticmethod
    def backward(_ctx: Any, gradient_P: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient_P, None
