"""Log-probabilities and entropies of tokens from hidden states, without ever keeping [P, V] logits.

The head runs over slices of the rows that count; backward computes a slice's logits again (T. Chen et al., arXiv:1604.06174). What is
alive at one time is [rows per slice, V], in forward and in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.functional import linear, nll_loss

from hpcrl.trainer.models.logits import capped

Entropy = Literal["trained", "metric", "none", "norms"]
"""Use of entropies: "trained", they are differentiable; "metric", they carry no gradient; "none", they are not computed, but 0. "norms": squared
norms take their place, those of the gradients of the labels' log-probabilities over the logits, and carry no gradient."""

Rows = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, float, torch.dtype, Entropy, torch.Tensor | None, torch.Tensor | None],
    tuple[torch.Tensor, ...],
]

# logit of a token that is never drawn; a number in 16-bit types too: an infinity would make entropies undefined
_LEFT_OUT = -3e4


def among(logits_RV: torch.Tensor, mask_RK: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Return the logits, with those of tokens outside of their row's sampling mask so low that their probability is 0.

    Args:
        mask_RK: as of MicroBatch: token ids padded with -1; a row of -1 alone leaves no token out.
        first: token of the first column.
    """
    size, own_RK = logits_RV.shape[1], mask_RK.long() - first
    # others in a column of their own
    places_RK = torch.where((mask_RK >= 0) & (own_RK >= 0) & (own_RK < size), own_RK, size)
    kept_RV = torch.zeros(len(logits_RV), size + 1, dtype=torch.bool, device=logits_RV.device)
    kept_RV = kept_RV.scatter(1, places_RK, True)[:, :size]
    whole_R = (mask_RK < 0).all(1)
    return logits_RV.masked_fill(~(kept_RV | whole_R[:, None]), _LEFT_OUT)


def plain_rows(
    hidden_RD: torch.Tensor,
    head_VD: torch.Tensor,
    labels_R: torch.Tensor,
    temperature: float,
    dtype: torch.dtype,
    entropy: Entropy = "trained",
    mask_RK: torch.Tensor | None = None,
    ids_RK: torch.Tensor | None = None,
    softcap: float | None = None,
    never: torch.Tensor | None = None,
    only: range | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return log-probabilities of the labels and entropies, [R] float32 each, with all logits at the same time.

    Args:
        dtype: of logits and log-probabilities; sums over the vocabulary are float32 in any case.
        mask_RK: as of token_logprobs.
        ids_RK: other tokens of each row, whose log-probabilities are returned too, [R, K] float32; they are those of the whole vocabulary. What
            is returned for -1 means nothing.
        softcap: as of LogitChange.
        never: [N] int64, tokens whose probability is 0.
        only: the tokens that have any, the labels among them; None: all but `never`.
    """
    if only is not None:
        head_VD, labels_R = head_VD[only.start : only.stop], labels_R - only.start
    logits_RV = capped(linear(hidden_RD, head_VD).to(dtype), softcap)
    if never is not None:
        logits_RV = logits_RV.index_fill(1, never, _LEFT_OUT)
    if temperature != 1.0:  # a division is one more [R, V], in backward too
        logits_RV = logits_RV / temperature
    more: tuple[torch.Tensor, ...] = ()
    if ids_RK is not None:
        more = (
            logits_RV.gather(-1, ids_RK.long().clamp(min=0)).float() - logits_RV.float().logsumexp(-1, keepdim=True),
        )
    if mask_RK is not None:
        logits_RV = among(logits_RV, mask_RK, only.start if only is not None else 0)
    if dtype == torch.float16 and logits_RV.device.type == "cpu":  # whose log_softmax adds up in float16, and overflows
        logprobs_RV = logits_RV.log_softmax(-1, dtype=torch.float32).to(dtype)
    else:
        logprobs_RV = logits_RV.log_softmax(-1)
    logprobs_R = -nll_loss(logprobs_RV, labels_R, reduction="none").float()
    if entropy == "none":
        return logprobs_R, logprobs_R.new_zeros(len(logprobs_R)), *more
    if entropy == "norms":
        return logprobs_R, _squared_norms(logprobs_RV.detach(), labels_R), *more
    measured_RV = logprobs_RV if entropy == "trained" else logprobs_RV.detach()
    return logprobs_R, -(measured_RV.exp() * measured_RV).sum(-1, dtype=torch.float32), *more


def _squared_norms(logprobs_RV: torch.Tensor, labels_R: torch.Tensor) -> torch.Tensor:
    """Return the sum over tokens v of (1[v is the label] - π(v))^2, which is 1 - 2 π(label) + Σ π(v)^2, [R] float32."""
    places_R1 = labels_R[:, None]
    others_R1 = torch.expm1(logprobs_RV.gather(-1, places_R1))  # π - 1 would be rounding where π is near 1
    return logprobs_RV.exp().scatter(-1, places_R1, others_R1).square().sum(-1, dtype=torch.float32)


def top_rows(
    top_k: int,
    vocabulary: int | None,
    hidden_RD: torch.Tensor,
    head_VD: torch.Tensor,
    labels_R: torch.Tensor,
    temperature: float,
    dtype: torch.dtype,
    _entropy: Entropy = "none",
    mask_RK: torch.Tensor | None = None,
    ids_RK: torch.Tensor | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return log-probabilities of the labels [R], and ids and log-probabilities of the `top_k` most probable tokens, [R, K]; see `plain_rows`.

    Args:
        vocabulary: tokens that the policy knows, of which these are; the head may have further ones. None: all of the head.
        ids_RK: the tokens that are to take their place; -1: none is known.
    """
    logits_RV = capped(linear(hidden_RD, head_VD).to(dtype), softcap) / temperature
    whole_RV = logits_RV.float() - logits_RV.float().logsumexp(-1, keepdim=True)
    ids_RK = whole_RV[:, :vocabulary].topk(top_k, -1).indices if ids_RK is None else ids_RK.long()
    among_RV = logits_RV if mask_RK is None else among(logits_RV, mask_RK)
    logprobs_R = among_RV.log_softmax(-1).gather(-1, labels_R[:, None])[:, 0].float()
    return logprobs_R, ids_RK, whole_RV.gather(-1, ids_RK.clamp(min=0))


def compiled_rows(softcap: float | None = None) -> Rows:
    """Return plain_rows compiled for any number of rows, at the first call: the passes over [R, V] become few."""
    return torch.compile(partial(plain_rows, softcap=softcap), dynamic=True)


class Head(nn.Linear):
    """The head of a policy: its weight is used by `token_logprobs`, not by a forward of its own."""

    def through(
        self, hidden_PD: torch.Tensor, compute: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]
    ) -> tuple[torch.Tensor, ...]:
        """Apply `compute` to hidden states and the weight, as a forward to FSDP, which gathers the weight here and in backward."""
        return compute(hidden_PD, self.weight)


def among_zeros(values_R: torch.Tensor, rows_R: torch.Tensor, size: int) -> torch.Tensor:
    """Return [size, ...] with `values_R` in these rows, and zeros in all others."""
    return values_R.new_zeros(size, *values_R.shape[1:]).index_copy(0, rows_R, values_R)


def token_logprobs(
    hidden_PD: torch.Tensor,
    head_VD: torch.Tensor,
    labels_P: torch.Tensor,
    temperature: float,
    chunk_rows: int,
    rows: Rows = plain_rows,
    dtype: torch.dtype = torch.float32,
    entropy: Entropy = "trained",
    mask_PK: torch.Tensor | None = None,
    ids_PK: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return log pi(label), differentiable, and the entropy of pi at each row, both [P] float32; with `ids_PK` theirs too, [P, K].

    pi = softmax(hidden head^T / temperature), over the tokens of the row's sampling mask where it has one
    (DeepSeek-V3.2, arXiv:2512.02556, section 3.1, "Keep Sampling Mask").

    Args:
        chunk_rows: rows whose logits exist at the same time.
        rows: plain_rows or what compiled_rows made.
        dtype: in which logits become log-probabilities. In a 16-bit type those have 8 (bfloat16) or 11 significant bits, and
            float16 holds logits up to 65504.
        entropy: what entropies are for.
        mask_PK: sampling masks, as of MicroBatch; the label is in its row's.
        ids_PK: other tokens of each row.
    """
    assert hidden_PD.ndim == 2, f"hidden states are [P, D], not {tuple(hidden_PD.shape)}"
    assert temperature > 0
    assert chunk_rows > 0
    if len(hidden_PD) <= chunk_rows:
        return rows(hidden_PD, head_VD, labels_P, temperature, dtype, entropy, mask_PK, ids_PK)
    settings = temperature, dtype, entropy
    found: Any = _Sliced.apply(hidden_PD, head_VD, labels_P, mask_PK, ids_PK, chunk_rows, rows, settings)
    return found


class _Sliced(torch.autograd.Function):
    """`rows` over slices. The head's gradient is added up in float32 and rounded once, not once per slice."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        hidden_PD: torch.Tensor,
        head_VD: torch.Tensor,
        labels_P: torch.Tensor,
        mask_PK: torch.Tensor | None,
        ids_PK: torch.Tensor | None,
        chunk_rows: int,
        rows: Rows,
        settings: tuple[float, torch.dtype, Entropy],
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(hidden_PD, head_VD, labels_P, mask_PK, ids_PK)
        ctx.chunk_rows, ctx.rows, ctx.settings = chunk_rows, rows, settings
        slices = [
            rows(hidden_PD[part], head_VD, labels_P[part], *settings, _part(mask_PK, part), _part(ids_PK, part))
            for part in _slices(len(hidden_PD), chunk_rows)
        ]
        outputs = tuple(map(torch.cat, zip(*slices, strict=True)))
        if settings[-1] != "trained":
            ctx.mark_non_differentiable(outputs[1])
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden_PD, head_VD, labels_P, mask_PK, ids_PK = ctx.saved_tensors
        temperature, dtype, entropy = ctx.settings
        head_wanted, trained = ctx.needs_input_grad[1], entropy == "trained"
        wanted = [at for at in range(len(gradients)) if trained or at != 1]
        settings = temperature, dtype, "trained" if trained else "none"
        of_hidden_PD = torch.empty_like(hidden_PD)
        of_head_VD = torch.zeros_like(head_VD, dtype=torch.float32) if head_wanted else None
        for part in _slices(len(hidden_PD), ctx.chunk_rows):
            hidden = hidden_PD[part].detach().requires_grad_()
            head = head_VD.detach().requires_grad_(head_wanted)
            with torch.enable_grad():
                outputs = ctx.rows(hidden, head, labels_P[part], *settings, _part(mask_PK, part), _part(ids_PK, part))
            torch.autograd.backward([outputs[at] for at in wanted], [gradients[at][part] for at in wanted])
            of_hidden_PD[part] = hidden.grad
            if of_head_VD is not None:
                of_head_VD += head.grad
                head.grad = None  # before the sum is copied into the type of the head
        return of_hidden_PD, None if of_head_VD is None else of_head_VD.to(head_VD.dtype), *[None] * 6


def _part(values_PK: torch.Tensor | None, part: slice) -> torch.Tensor | None:
    return None if values_PK is None else values_PK[part]


def _slices(total: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, total, size)]
