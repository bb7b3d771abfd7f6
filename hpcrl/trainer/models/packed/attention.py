"""Attention over packed samples: causal within each sample, nothing across samples, and no [P, P] mask anywhere.

A transformers model built with `attn_implementation=PACKED` calls `packed_attention` in every layer. The model's forward is given
`packed=PackedSequences.of(lengths, cu_seqlens)`, or the PrefixTree of tree.py, which transformers hands through to it; or `packed=None`
for rows that are padded on the right.
PADDED is the same without any flash attention kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hpcrl.errors import DataError
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

PACKED = "hpcrl_packed"
PADDED = "hpcrl_padded"

# pairs of tokens times columns of all heads: what a CPU core computes while calling the kernel for one sample costs about as much
_CALL = 300_000
# what some models give their attention beside what AttentionKind has
_NOT_COMPUTED = ("position_bias",)


class Packed(Protocol):
    """Samples that lie end to end, P tokens.

    Attributes:
        lengths: tokens of each whole sample.
        cu_seqlens: [B + 1] int32, cumulative lengths from 0.
    """

    @property
    def lengths(self) -> Sequence[int]: ...

    @property
    def cu_seqlens(self) -> torch.Tensor: ...

    @property
    def max_seqlen(self) -> int: ...

    @property
    def tokens(self) -> int:
        """How many tokens are computed."""
        ...

    def computed(self, values_P: torch.Tensor, /) -> torch.Tensor:
        """Return [D, ...] of [P, ...]: the entries of computed tokens."""
        ...

    def spread(self, values_D: torch.Tensor, at_R: torch.Tensor | None = None, /) -> torch.Tensor:
        """Return [R, ...] of [D, ...]: the entries of these of the P tokens, or of all."""
        ...

    def attend(
        self, query_DHN: torch.Tensor, key_DHN: torch.Tensor, value_DHN: torch.Tensor, kind: AttentionKind, /
    ) -> torch.Tensor:
        """Return the attention output [D, H, N], causal within each sample; there may be fewer heads in key and value."""
        ...


@dataclass(frozen=True)
class PackedSequences:
    """Positions of the samples of a packed micro-batch.

    Attributes:
        lengths: tokens of each sample; B samples, the longest of Tmax tokens.
        cu_seqlens: [B + 1] int32, cumulative lengths from 0.
        slots: [P] int64, place of each packed token in [B, Tmax] flattened; None if all samples have the same length.
    """

    lengths: Sequence[int]
    cu_seqlens: torch.Tensor
    slots: torch.Tensor | None
    _seen: dict[int | None, BlockMask] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, lengths: Sequence[int], cu_seqlens: torch.Tensor) -> PackedSequences:
        """Return it on the device of `cu_seqlens`, [B + 1] int32 cumulative lengths."""
        count, max_seqlen, total = len(lengths), max(lengths), sum(lengths)
        if min(lengths) == max_seqlen:
            return cls(lengths, cu_seqlens, None)
        device = cu_seqlens.device
        # sample b starts at slot b * max_seqlen instead of cu_seqlens[b]
        offsets_B = torch.arange(count, device=device) * max_seqlen - cu_seqlens[:-1]
        slots = torch.arange(total, device=device) + offsets_B.repeat_interleave(cu_seqlens.diff(), output_size=total)
        return cls(lengths, cu_seqlens, slots)

    @property
    def count(self) -> int:
        return len(self.lengths)

    @property
    def max_seqlen(self) -> int:
        return max(self.lengths)

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def padded_pairs(self) -> int:
        """Pairs of tokens, per sample on average, that attention over `rows` computes for padding."""
        return self.max_seqlen**2 - sum(length**2 for length in self.lengths) // self.count

    def rows(self, packed: torch.Tensor) -> torch.Tensor:
        """Return [B, Tmax, ...] for [P, ...]: a row per sample, zeros on its right."""
        if self.slots is not None:
            padded = packed.new_zeros(self.count * self.max_seqlen, *packed.shape[1:])
            packed = padded.index_copy(0, self.slots, packed)
        return packed.view(self.count, self.max_seqlen, *packed.shape[1:])

    def flat(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [P, ...] for [B, Tmax, ...]: what is not padding, end to end."""
        flat = rows.flatten(0, 1)
        return flat if self.slots is None else flat[self.slots]

    def computed(self, values_P: torch.Tensor) -> torch.Tensor:
        return values_P

    def spread(self, values_P: torch.Tensor, at_R: torch.Tensor | None = None) -> torch.Tensor:
        return values_P if at_R is None else values_P.index_select(0, at_R)

    def seen(self, window: int | None) -> BlockMask:
        """Return which tokens each one sees, one mask in all layers with that window."""
        if window not in self._seen:
            places = Places.of(self.cu_seqlens, sum(self.lengths))
            self._seen[window] = seen_blocks(places, places, window)
        return self._seen[window]

    def attend(
        self, query_PHN: torch.Tensor, key_PHN: torch.Tensor, value_PHN: torch.Tensor, kind: AttentionKind
    ) -> torch.Tensor:
        return attend(query_PHN, key_PHN, value_PHN, self, kind)


@torch.compiler.disable  # compiled code would be compiled again for each list of lengths
def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    flash: bool = True,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return the attention output [1, P, H, D] for query [1, H, P, D], key and value [1, Hkv, P, D], of the tokens that are computed.

    Without `packed`: [B, T, H, D] for rows [B, H, T, D], which may be padded on the right.

    Dropout is never applied: old and new log-probabilities of a policy must come from the same function.

    Raises:
        DataError: the model's attention is of a kind that this function does not compute.
    """
    assert attention_mask is None, "transformers makes no mask for an attention function that it does not know"
    others = [name for name in _NOT_COMPUTED if options.get(name) is not None]
    if "packed" not in options:
        others.append("no way to tell it which samples its tokens are of")
    if others:
        raise DataError(
            f"the attention of this model, {type(module).__name__}, has {', '.join(others)}, which hpcrl cannot train; use another model"
        )
    packed: Packed | None = options["packed"]
    both_ways = not getattr(module, "is_causal", True)
    kind = AttentionKind(scaling, sliding_window, options.get("softcap"), options.get("s_aux"), flash, both_ways)
    if packed is None:
        if both_ways:
            raise DataError("a model whose tokens see those behind them needs trainer.use_sample_packing=true")
        return of_rows(query, key, value, kind).transpose(1, 2), None
    assert query.shape[0] == 1, f"packed micro-batches are one row, not {query.shape[0]}"
    query_PHD, key_PHD, value_PHD = (heads[0].transpose(0, 1) for heads in (query, key, value))
    return packed.attend(query_PHD, key_PHD, value_PHD, kind).unsqueeze(0), None


def of_rows(
    query_BHTD: torch.Tensor, key_BHTD: torch.Tensor, value_BHTD: torch.Tensor, kind: AttentionKind
) -> torch.Tensor:
    """Return the attention output [B, H, T, D] of right-padded rows."""
    compute = causal if kind.plain(query_BHTD.shape[2]) else last_tokens
    return compute(query_BHTD, key_BHTD, value_BHTD, kind)


def attend(
    query_PHD: torch.Tensor,
    key_PHD: torch.Tensor,
    value_PHD: torch.Tensor,
    packed: PackedSequences,
    kind: AttentionKind,
) -> torch.Tensor:
    """Return the attention output [P, H, D], causal within each packed sample; there may be fewer heads in key and value."""
    if has_varlen(query_PHD, kind):
        bounds, longest = packed.cu_seqlens, packed.max_seqlen
        return varlen(query_PHD, key_PHD, value_PHD, bounds, bounds, longest, longest, kind)
    if query_PHD.is_cuda and not kind.softmax_only:
        return flex(query_PHD, key_PHD, value_PHD, kind, packed.seen(kind.window))
    if kind.both_ways or (query_PHD.device.type == "cpu" and packed.padded_pairs * query_PHD[0].numel() > _CALL):
        of_samples = (
            heads_PHD[None].transpose(1, 2).split(list(packed.lengths), 2)
            for heads_PHD in (query_PHD, key_PHD, value_PHD)
        )
        outputs = (of_rows(query, key, value, kind) for query, key, value in zip(*of_samples, strict=True))
        return torch.cat([output[0].transpose(0, 1) for output in outputs])
    query, key, value = (packed.rows(head_PHD).transpose(1, 2) for head_PHD in (query_PHD, key_PHD, value_PHD))
    return packed.flat(of_rows(query, key, value, kind).transpose(1, 2))


ALL_ATTENTION_FUNCTIONS.register(PACKED, packed_attention)
ALL_ATTENTION_FUNCTIONS.register(PADDED, partial(packed_attention, flash=False))
