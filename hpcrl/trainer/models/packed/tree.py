"""Attention and hidden states of packed samples whose common prefixes are computed once.

G samples of a prompt of P tokens, with responses of R, are P + G R tokens.

Embeddings, linear layers, norms and MLPs run over the tokens that are left, at the positions that they have in their samples. In attention a
token asks for the keys and values of its own sample, some of which belong to samples before it. Hidden states are laid out as whole
samples before heads and losses see them. Gradients of all samples add up in the prefix that they share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

from hpcrl.trainer.models.packed.kernels import (
    AttentionKind,
    Places,
    causal,
    flex,
    has_varlen,
    last_tokens,
    seen_blocks,
    varlen,
)
from hpcrl.types import SharedPrefixes


@dataclass(frozen=True)
class PrefixTree:
    """Packed samples, as PackedSequences are, of which only the D tokens exist that `prefixes` keeps.

    Attributes:
        lengths: tokens of each whole sample.
        cu_seqlens: [B + 1] int32, cumulative lengths from 0.
    """

    lengths: Sequence[int]
    cu_seqlens: torch.Tensor
    prefixes: SharedPrefixes
    _masks: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict, compare=False)
    _seen: dict[int | None, BlockMask] = field(default_factory=dict, compare=False)

    @property
    def max_seqlen(self) -> int:
        return max(self.lengths)

    @property
    def tokens(self) -> int:
        return sum(self.prefixes.lengths)

    def computed(self, values_P: torch.Tensor) -> torch.Tensor:
        """Return [D, ...] of [P, ...]: the entries of computed tokens."""
        return values_P.index_select(0, self.prefixes.kept)

    def spread(self, values_D: torch.Tensor, at_R: torch.Tensor | None = None) -> torch.Tensor:
        """Return [R, ...] of [D, ...]: the entries of these of the P tokens, or of all."""
        places_P = self.prefixes.places
        return gathered(values_D, places_P if at_R is None else places_P.index_select(0, at_R))

    def attend(
        self, query_DHN: torch.Tensor, key_DHN: torch.Tensor, value_DHN: torch.Tensor, kind: AttentionKind
    ) -> torch.Tensor:
        """Return the attention output [D, H, N], causal within each whole sample; there may be fewer heads in key and value.

        Linear layers dominate where prefixes are worth sharing, so that each sample has copies of its keys and values. Kernels for samples
        of different lengths are then sufficient. They take the queries for the last ones of a sample.
        """
        own, bounds = self.prefixes.lengths, (self.prefixes.cu_lengths, self.cu_seqlens)
        key_PHN, value_PHN = self.spread(key_DHN), self.spread(value_DHN)
        if has_varlen(query_DHN, kind):
            return varlen(query_DHN, key_PHN, value_PHN, *bounds, max(own), self.max_seqlen, kind)
        if query_DHN.is_cuda and not kind.softmax_only:
            return flex(query_DHN, key_PHN, value_PHN, kind, self._seen_by(kind.window))
        of_samples = zip(
            *(
                heads[None].transpose(1, 2).split(list(sizes), 2)
                for heads, sizes in ((query_DHN, own), (key_PHN, self.lengths), (value_PHN, self.lengths))
            ),
            strict=True,
        )
        outputs = [self._of_sample(query, key, value, kind) for query, key, value in of_samples]
        return torch.cat([output[0].transpose(0, 1) for output in outputs])

    def _of_sample(
        self, query_1HTN: torch.Tensor, key_1HTN: torch.Tensor, value_1HTN: torch.Tensor, kind: AttentionKind
    ) -> torch.Tensor:
        if kind.plain(key_1HTN.shape[2]):
            return causal(query_1HTN, key_1HTN, value_1HTN, kind, self._mask(query_1HTN, key_1HTN))
        return last_tokens(query_1HTN, key_1HTN, value_1HTN, kind)

    def _seen_by(self, window: int | None) -> BlockMask:
        if window not in self._seen:
            places = Places.of(self.cu_seqlens, sum(self.lengths))
            self._seen[window] = seen_blocks(places.part(self.prefixes.kept), places, window)
        return self._seen[window]

    def _mask(self, query_1HTN: torch.Tensor, key_1HTN: torch.Tensor) -> torch.Tensor | None:
        """Return what is added to the scores of the last tokens of a sample, one tensor in all layers; None: the sample has no other tokens."""
        own, length = query_1HTN.shape[2], key_1HTN.shape[2]
        if own == length:
            return None
        if (own, length) not in self._masks:
            below = torch.full((own, length), -torch.inf, dtype=query_1HTN.dtype, device=query_1HTN.device)
            self._masks[own, length] = below.triu(length - own + 1)
        return self._masks[own, length]


def gathered(values_D: torch.Tensor, places_R: torch.Tensor) -> torch.Tensor:
    """Return values_D[places_R]; gradients are added up in float32 and rounded once, not once per sample."""
    found: Any = _Gathered.apply(values_D, places_R)
    return found


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_D: torch.Tensor, places_R: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(places_R)
        ctx.size = len(values_D)
        return values_D.index_select(0, places_R)

    @staticmethod
    def backward(ctx: Any, gradient_R: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (places_R,) = ctx.saved_tensors
        dtype = torch.promote_types(gradient_R.dtype, torch.float32)
        sums_D = gradient_R.new_zeros(ctx.size, *gradient_R.shape[1:], dtype=dtype)
        return sums_D.index_add_(0, places_R, gradient_R.to(dtype)).to(gradient_R.dtype), None
