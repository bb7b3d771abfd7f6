"""Causal attention by the kernels that torch has: with a sliding window, with capped scores and with sinks, which not every kernel knows."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any, cast

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

_NO_FLASH = [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_QUERIES = 512  # whose scores exist at the same time where no kernel knows what is asked


@dataclass(frozen=True)
class AttentionKind:
    """Kind of a layer's attention.

    Attributes:
        scale: of the scores; None: 1 / sqrt(columns of a head).
        window: how many tokens a token sees, itself included; None: all before it.
        softcap: scores x become softcap tanh(x / softcap) (Gemma 2, arXiv:2408.00118, section 2).
        sinks: [H], a score of each head that takes a part of the weight and has no value (gpt-oss, arXiv:2508.10925, section 2).
        flash: flash attention is used where there is one.
        both_ways: each token sees all of its sample, and not only those before it.
    """

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    flash: bool = True
    both_ways: bool = False

    @property
    def softmax_only(self) -> bool:
        """Whether weights are the softmax of the scores, which every kernel knows."""
        return self.softcap is None and self.sinks is None

    def plain(self, longest: int) -> bool:
        """Return whether a sample of so many tokens needs causal attention and nothing else."""
        return self.softmax_only and not self.limits(longest)

    def limits(self, longest: int) -> bool:
        """Return whether there are tokens that the last of so many does not see."""
        return self.window is not None and longest > self.window


def has_varlen(query_PHD: torch.Tensor, kind: AttentionKind) -> bool:
    """Return whether there is flash attention for these queries, which knows half precision on GPUs only."""
    return kind.flash and kind.softmax_only and query_PHD.is_cuda and query_PHD.dtype in (torch.bfloat16, torch.float16)


def varlen(
    query_QHD: torch.Tensor,
    key_PHD: torch.Tensor,
    value_PHD: torch.Tensor,
    cu_queries: torch.Tensor,
    cu_keys: torch.Tensor,
    most_queries: int,
    most_keys: int,
    kind: AttentionKind,
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
        scale=kind.scale,
        window_size=(
            kind.window - 1 if kind.window is not None and kind.limits(most_keys) else -1,
            -1 if kind.both_ways else 0,
        ),
        **options,
    )
    assert isinstance(output, torch.Tensor)
    return output


def causal(
    query_BHTD: torch.Tensor,
    key_BHTD: torch.Tensor,
    value_BHTD: torch.Tensor,
    kind: AttentionKind,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention output over right-padded rows, of a kind that is plain for them: a token never looks at what follows it, so that the
    padding needs no mask. Where it does (`both_ways`), there is no padding.

    Args:
        mask: of the scores, as scaled_dot_product_attention takes it, where there are fewer queries than keys or a window.
    """
    with nullcontext() if kind.flash else sdpa_kernel(_NO_FLASH):
        return scaled_dot_product_attention(
            query_BHTD,
            key_BHTD,
            value_BHTD,
            attn_mask=mask,
            is_causal=mask is None and not kind.both_ways,
            scale=kind.scale,
            enable_gqa=query_BHTD.shape[1] != key_BHTD.shape[1],
        )


def last_tokens(
    query_BHQD: torch.Tensor, key_BHKD: torch.Tensor, value_BHKD: torch.Tensor, kind: AttentionKind
) -> torch.Tensor:
    """Return the attention output [B, H, Q, D] of any kind, for the last Q tokens of right-padded rows of K tokens.

    Some queries are computed at a time, with no more keys than they see: T tokens with a window of W cost T (W + 512) scores.
    """
    size, before = query_BHQD.shape[2], key_BHKD.shape[2] - query_BHQD.shape[2]
    outputs = []
    for first in range(0, size, _QUERIES):
        queries = slice(first, min(first + _QUERIES, size))
        begin, end = before + queries.start, before + queries.stop
        least = 0 if kind.window is None else max(0, begin - kind.window + 1)
        places_Q, places_K = (torch.arange(at, end, device=query_BHQD.device) for at in (begin, least))
        back_QK = places_Q[:, None] - places_K
        seen_QK = back_QK >= 0 if kind.window is None else (back_QK >= 0) & (back_QK < kind.window)
        of_these = query_BHQD[:, :, queries], key_BHKD[:, :, least:end], value_BHKD[:, :, least:end], kind, seen_QK
        outputs.append(causal(*of_these) if kind.softmax_only else _weighted(*of_these))
    return torch.cat(outputs, 2)


def _weighted(
    query_BHQD: torch.Tensor,
    key_BHKD: torch.Tensor,
    value_BHKD: torch.Tensor,
    kind: AttentionKind,
    seen_QK: torch.Tensor,
) -> torch.Tensor:
    """Return the attention output with all scores at the same time, their softmax in float32."""
    times = query_BHQD.shape[1] // key_BHKD.shape[1]
    key_BHKD, value_BHKD = (heads.repeat_interleave(times, 1) for heads in (key_BHKD, value_BHKD))
    scale = query_BHQD.shape[-1] ** -0.5 if kind.scale is None else kind.scale
    scores_BHQK = scale * (query_BHQD @ key_BHKD.transpose(2, 3))
    if kind.softcap is not None:
        scores_BHQK = kind.softcap * (scores_BHQK / kind.softcap).tanh()
    scores_BHQK = scores_BHQK.masked_fill(~seen_QK, -torch.inf)
    if kind.sinks is not None:
        sinks_BHQ1 = kind.sinks.to(scores_BHQK).view(1, -1, 1, 1).expand(*scores_BHQK.shape[:3], 1)
        scores_BHQK = torch.cat([scores_BHQK, sinks_BHQ1], -1)
    weights_BHQK = scores_BHQK.softmax(-1, dtype=torch.float32).to(value_BHKD.dtype)[..., : key_BHKD.shape[2]]
    return weights_BHQK @ value_BHKD


@dataclass(frozen=True)
class Places:
    """Positions of tokens: the number of each one's sample, and its place in that; [P] int64 both."""

    samples: torch.Tensor
    at: torch.Tensor

    @classmethod
    def of(cls, cu_seqlens: torch.Tensor, total: int) -> Places:
        """Return those of all tokens of packed samples.

        Args:
            cu_seqlens: [B + 1] int32, cumulative lengths from 0.
            total: of the tokens.
        """
        starts_B, device = cu_seqlens[:-1].long(), cu_seqlens.device
        samples = torch.arange(len(starts_B), device=device).repeat_interleave(cu_seqlens.diff(), output_size=total)
        return cls(samples, torch.arange(total, device=device) - starts_B[samples])

    def part(self, kept: torch.Tensor) -> Places:
        """Return those of some tokens."""
        return Places(self.samples[kept], self.at[kept])


def seen_blocks(queries: Places, keys: Places, window: int | None) -> BlockMask:
    """Return which keys each query sees: those of its sample that are not after it, nor further back than the window."""

    def seen(_batch: torch.Tensor, _head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        back = queries.at[query] - keys.at[key]
        found = (queries.samples[query] == keys.samples[key]) & (back >= 0)
        return found if window is None else found & (back < window)

    device = queries.at.device
    return create_block_mask(
        seen, None, None, len(queries.at), len(keys.at), device.type, _compile=device.type == "cuda"
    )


def flex(
    query_QHD: torch.Tensor, key_PHD: torch.Tensor, value_PHD: torch.Tensor, kind: AttentionKind, seen: BlockMask
) -> torch.Tensor:
    """Return the attention output [Q, H, D] of any kind by FlexAttention (arXiv:2412.05496), which knows no scores of single tokens in memory.

    Args:
        seen: as `seen_blocks` makes it.
    """
    # a tensor: compiled code whose sizes are dynamic takes a number for dynamic too, which FlexAttention cannot
    softcap = None if kind.softcap is None else torch.full((), kind.softcap, device=query_QHD.device)

    def capped(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        assert softcap is not None
        return softcap * torch.tanh(score / softcap)

    heads = (heads_PHD[None].transpose(1, 2) for heads_PHD in (query_QHD, key_PHD, value_PHD))
    output_1HQD, aux = cast(
        "tuple[torch.Tensor, Any]",
        _flex(query_QHD.is_cuda)(
            *heads,
            score_mod=None if softcap is None else capped,
            block_mask=seen,
            scale=kind.scale,
            enable_gqa=query_QHD.shape[1] != key_PHD.shape[1],
            return_aux=AuxRequest(lse=True),
        ),
    )
    if kind.sinks is not None:  # e^s more in the denominator of the softmax
        kept_1HQ = torch.sigmoid(aux.lse - kind.sinks.to(aux.lse)[:, None])
        output_1HQD = output_1HQD * kept_1HQ[..., None].to(output_1HQD.dtype)
    return output_1HQD[0].transpose(0, 1)


@cache
def _flex(on_gpu: bool) -> Any:
    return torch.compile(flex_attention, dynamic=True) if on_gpu else flex_attention
