"""Attention over packed samples: causal within each sample, nothing across samples, and no [P, P] mask anywhere.

A transformers model built with `attn_implementation=PACKED` calls `packed_attention` in every layer. The model's forward is given
`packed=Layout.of(lengths, device)`, which transformers hands through to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hpcrl.errors import DataError

PACKED = "hpcrl_packed"


@dataclass(frozen=True)
class Layout:
    """Where the samples of a packed micro-batch lie.

    Attributes:
        count: samples, B.
        longest: tokens of the longest sample, Tmax.
        bounds: [B + 1] int32, cumulated lengths from 0.
        slots: [P] int64, place of each packed token in [B, Tmax] flattened; None if all samples have the same length.
    """

    count: int
    longest: int
    bounds: torch.Tensor
    slots: torch.Tensor | None

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Layout:
        count, longest = len(lengths), max(lengths)
        sizes = torch.tensor(lengths)
        ends = sizes.cumsum(0)
        bounds = torch.cat([torch.zeros(1, dtype=torch.int64), ends]).int().to(device)
        if min(lengths) == longest:
            return cls(count, longest, bounds, None)
        # sample b starts at slot b * longest instead of ends[b] - sizes[b]
        offsets = torch.arange(count) * longest - (ends - sizes)
        slots = torch.arange(int(ends[-1])) + offsets.repeat_interleave(sizes)
        return cls(count, longest, bounds, slots.to(device))


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed: Layout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return the attention output [1, P, H, D] for query [1, H, P, D], key and value [1, Hkv, P, D].

    Dropout is never applied: old and new log-probabilities of a policy must come from the same function.

    Raises:
        DataError: the model's attention is of a kind that this function does not compute.
    """
    assert attention_mask is None, "transformers makes no mask for an attention function that it does not know"
    assert query.shape[0] == 1, f"packed micro-batches are one row, not {query.shape[0]}"
    unsupported = {name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None}
    if sliding_window is not None and packed.longest > sliding_window:
        unsupported.add(f"sliding window of {sliding_window} tokens for a sample of {packed.longest}")
    if unsupported:
        raise DataError(
            f"{type(module).__name__} needs {', '.join(sorted(unsupported))}: not supported, use another model"
        )
    heads = (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    # flash attention knows half precision only
    varlen = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    return (_varlen if varlen else _padded)(*heads, packed, scaling).unsqueeze(0), None


def _varlen(
    query_PHD: torch.Tensor, key_PHD: torch.Tensor, value_PHD: torch.Tensor, packed: Layout, scale: float | None
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    output = varlen_attn(
        query_PHD,
        key_PHD,
        value_PHD,
        packed.bounds,
        packed.bounds,
        packed.longest,
        packed.longest,
        scale=scale,
        window_size=(-1, 0),
        enable_gqa=query_PHD.shape[1] != key_PHD.shape[1],
    )
    assert isinstance(output, torch.Tensor)
    return output


def _padded(
    query_PHD: torch.Tensor, key_PHD: torch.Tensor, value_PHD: torch.Tensor, packed: Layout, scale: float | None
) -> torch.Tensor:
    """Causal attention over right-padded rows: a token never looks at what follows it, so the padding needs no mask."""

    def rows(packed_PHD: torch.Tensor) -> torch.Tensor:
        if packed.slots is not None:
            padded = packed_PHD.new_zeros(packed.count * packed.longest, *packed_PHD.shape[1:])
            packed_PHD = padded.index_copy(0, packed.slots, packed_PHD)
        return packed_PHD.view(packed.count, packed.longest, *packed_PHD.shape[1:]).transpose(1, 2)

    output_BHTD = scaled_dot_product_attention(
        rows(query_PHD),
        rows(key_PHD),
        rows(value_PHD),
        is_causal=True,
        scale=scale,
        enable_gqa=query_PHD.shape[1] != key_PHD.shape[1],
    )
    output = output_BHTD.transpose(1, 2).flatten(0, 1)
    return output if packed.slots is None else output[packed.slots]


ALL_ATTENTION_FUNCTIONS.register(PACKED, packed_attention)
