"""Attention over packed samples: causal within each sample, nothing across samples, and no [P, P] mask anywhere.

A transformers model built with `attn_implementation=PACKED` calls `packed_attention` in every layer. The model's forward is given
`packed=PackedSequences.of(lengths, cu_seqlens)`, or the PrefixTree of tree.py, which transformers hands through to it; or `packed=None`
for rows that are padded on the right.
PADDED is the same without any flash attention kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hpcrl.config.rules.model_fit import other_layers
from hpcrl.errors import DataError

PACKED = "hpcrl_packed"
PADDED = "hpcrl_padded"

# pairs of tokens times columns of all heads: what a CPU core computes while calling the kernel for one sample costs about as much
_CALL = 300_000
_NO_FLASH = [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Packed(Protocol):
    """Samples that lie end to end, P tokens.

    Attributes:
        cu_seqlens: [B + 1] int32, cumulative lengths of the whole samples from 0.
    """

    @property
    def cu_seqlens(self) -> torch.Tensor: ...

    @property
    def max_seqlen(self) -> int: ...

    def computed(self, values_P: torch.Tensor) -> torch.Tensor:
        """Return [D, ...] of [P, ...]: what speaks about the tokens that are computed."""
        ...

    def spread(self, values_D: torch.Tensor, at_R: torch.Tensor | None = None, /) -> torch.Tensor:
        """Return [R, ...] of [D, ...]: what belongs to these of the P tokens, or to all."""
        ...

    def attend(
        self,
        query_DHN: torch.Tensor,
        key_DHN: torch.Tensor,
        value_DHN: torch.Tensor,
        scale: float | None,
        flash: bool,
        /,
    ) -> torch.Tensor:
        """Return the attention output [D, H, N], causal within each sample; there may be fewer heads in key and value."""
        ...


@dataclass(frozen=True)
class PackedSequences:
    """Where the samples of a packed micro-batch lie.

    Attributes:
        lengths: tokens of each sample; B samples, the longest of Tmax tokens.
        cu_seqlens: [B + 1] int32, cumulative lengths from 0.
        slots: [P] int64, place of each packed token in [B, Tmax] flattened; None if all samples have the same length.
    """

    lengths: Sequence[int]
    cu_seqlens: torch.Tensor
    slots: torch.Tensor | None

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

    def attend(
        self, query_PHN: torch.Tensor, key_PHN: torch.Tensor, value_PHN: torch.Tensor, scale: float | None, flash: bool
    ) -> torch.Tensor:
        return attend(query_PHN, key_PHN, value_PHN, self, scale, flash)


def require_attention_only(model: PreTrainedModel) -> None:
    """Look whether nothing but attention lets one token of a model depend on another.

    Raises:
        DataError: it has layers of another kind, whose state would go from one packed sample into the next.
    """
    others = other_layers(model.config.to_dict())
    others += sorted({type(module).__name__ for module in model.modules() if isinstance(module, nn.Conv1d)})
    if others:
        raise DataError(
            f"{type(model).__name__} has layers that carry a state from token to token ({', '.join(others)}), which would go from one packed "
            "sample into the next; set use_sample_packing to false"
        )


@torch.compiler.disable  # compiled code would be compiled again for each list of lengths
def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed: Packed | None,
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
    unsupported = {name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None}
    max_seqlen = query.shape[2] if packed is None else packed.max_seqlen
    if sliding_window is not None and max_seqlen > sliding_window:
        unsupported.add(f"sliding window of {sliding_window} tokens for a sample of {max_seqlen}")
    if unsupported:
        raise DataError(
            f"{type(module).__name__} needs {', '.join(sorted(unsupported))}: not supported, use another model"
        )
    if packed is None:
        return causal(query, key, value, scaling, flash).transpose(1, 2), None
    assert query.shape[0] == 1, f"packed micro-batches are one row, not {query.shape[0]}"
    query_PHD, key_PHD, value_PHD = (heads[0].transpose(0, 1) for heads in (query, key, value))
    return packed.attend(query_PHD, key_PHD, value_PHD, scaling, flash).unsqueeze(0), None


def attend(
    query_PHD: torch.Tensor,
    key_PHD: torch.Tensor,
    value_PHD: torch.Tensor,
    packed: PackedSequences,
    scale: float | None,
    flash: bool = True,
) -> torch.Tensor:
    """Return the attention output [P, H, D], causal within each packed sample; there may be fewer heads in key and value."""
    if has_varlen(query_PHD, flash):
        bounds, longest = packed.cu_seqlens, packed.max_seqlen
        return varlen(query_PHD, key_PHD, value_PHD, bounds, bounds, longest, longest, scale)
    if query_PHD.device.type == "cpu" and packed.padded_pairs * query_PHD[0].numel() > _CALL:
        of_samples = (
            heads_PHD[None].transpose(1, 2).split(list(packed.lengths), 2)
            for heads_PHD in (query_PHD, key_PHD, value_PHD)
        )
        outputs = (causal(query, key, value, scale, flash) for query, key, value in zip(*of_samples, strict=True))
        return torch.cat([output[0].transpose(0, 1) for output in outputs])
    query, key, value = (packed.rows(head_PHD).transpose(1, 2) for head_PHD in (query_PHD, key_PHD, value_PHD))
    return packed.flat(causal(query, key, value, scale, flash).transpose(1, 2))


def has_varlen(query_PHD: torch.Tensor, flash: bool) -> bool:
    """Return whether there is flash attention for these queries, which knows half precision on GPUs only."""
    return flash and query_PHD.is_cuda and query_PHD.dtype in (torch.bfloat16, torch.float16)


def varlen(
    query_QHD: torch.Tensor,
    key_PHD: torch.Tensor,
    value_PHD: torch.Tensor,
    cu_queries: torch.Tensor,
    cu_keys: torch.Tensor,
    most_queries: int,
    most_keys: int,
    scale: float | None,
) -> torch.Tensor:
    """Return the attention output [Q, H, D] by flash attention; where a sample has fewer queries than keys, they are those of its last tokens.

    Args:
        cu_queries, cu_keys: [B + 1] int32, cumulative numbers of each sample's queries and keys from 0.
        most_queries, most_keys: of a sample.
    """
    from torch.nn.attention.varlen import varlen_attn

    times = query_QHD.shape[1] // key_PHD.shape[1]
    options: dict[str, Any] = {"enable_gqa": times > 1}
    if "enable_gqa" not in signature(varlen_attn).parameters:  # torch 2.11 wants as many heads everywhere
        options = {}
        key_PHD, value_PHD = (heads_PHD.repeat_interleave(times, 1) for heads_PHD in (key_PHD, value_PHD))
    output = varlen_attn(
        query_QHD,
        key_PHD,
        value_PHD,
        cu_queries,
        cu_keys,
        most_queries,
        most_keys,
        scale=scale,
        window_size=(-1, 0),
        **options,
    )
    assert isinstance(output, torch.Tensor)
    return output


def causal(
    query_BHTD: torch.Tensor,
    key_BHTD: torch.Tensor,
    value_BHTD: torch.Tensor,
    scale: float | None,
    flash: bool,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention over right-padded rows: a token never looks at what follows it, so the padding needs no mask.

    Args:
        mask: added to the scores, where there are fewer queries than keys.
    """
    with nullcontext() if flash else sdpa_kernel(_NO_FLASH):
        return scaled_dot_product_attention(
            query_BHTD,
            key_BHTD,
            value_BHTD,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=query_BHTD.shape[1] != key_BHTD.shape[1],
        )


ALL_ATTENTION_FUNCTIONS.register(PACKED, packed_attention)
ALL_ATTENTION_FUNCTIONS.register(PADDED, partial(packed_attention, flash=False))
