"""Log-probabilities and entropies of tokens from hidden states, without ever keeping [P, V] logits.

The head runs over slices of rows; backward computes a slice's logits again (T. Chen et al., arXiv:1604.06174). What is alive at
one time is [rows per slice, V], in forward and in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch.nn.functional import linear, nll_loss
from torch.utils.checkpoint import checkpoint

Entropy = Literal["trained", "metric", "none"]
"""What entropies are for: "trained", they are differentiable; "metric", they carry no gradient; "none", they are not computed, but 0."""

Rows = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, float, torch.dtype, Entropy], tuple[torch.Tensor, torch.Tensor]
]


def plain_rows(
    hidden_RD: torch.Tensor,
    head_VD: torch.Tensor,
    labels_R: torch.Tensor,
    temperature: float,
    dtype: torch.dtype,
    entropy: Entropy = "trained",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities of the labels and entropies, [R] float32 each, with all logits at the same time.

    Args:
        dtype: of logits and log-probabilities; sums over the vocabulary are float32 in any case.
    """
    logits_RV = linear(hidden_RD, head_VD).to(dtype) / temperature
    if dtype == torch.float16 and logits_RV.device.type == "cpu":  # whose log_softmax adds up in float16, and overflows
        logprobs_RV = logits_RV.log_softmax(-1, dtype=torch.float32).to(dtype)
    else:
        logprobs_RV = logits_RV.log_softmax(-1)
    logprobs_R = -nll_loss(logprobs_RV, labels_R, reduction="none").float()
    if entropy == "none":
        return logprobs_R, logprobs_R.new_zeros(len(logprobs_R))
    measured_RV = logprobs_RV if entropy == "trained" else logprobs_RV.detach()
    return logprobs_R, -(measured_RV.exp() * measured_RV).sum(-1, dtype=torch.float32)


def compiled_rows() -> Rows:
    """Return plain_rows compiled for any number of rows, at the first call: the passes over [R, V] become few."""
    return torch.compile(plain_rows, dynamic=True)


def token_logprobs(
    hidden_PD: torch.Tensor,
    head_VD: torch.Tensor,
    labels_P: torch.Tensor,
    temperature: float,
    chunk_rows: int,
    rows: Rows = plain_rows,
    dtype: torch.dtype = torch.float32,
    entropy: Entropy = "trained",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log pi(label), differentiable, and the entropy of pi at each row, both [P] float32.

    pi = softmax(hidden head^T / temperature).

    Args:
        chunk_rows: rows whose logits exist at the same time.
        rows: plain_rows or what compiled_rows made.
        dtype: in which logits become log-probabilities. In a 16-bit type those have 8 (bfloat16) or 11 significant bits, and
            float16 holds logits up to 65504.
        entropy: what entropies are for.
    """
    assert hidden_PD.ndim == 2, f"hidden states are [P, D], not {tuple(hidden_PD.shape)}"
    assert temperature > 0
    assert chunk_rows > 0
    if len(hidden_PD) <= chunk_rows:
        return rows(hidden_PD, head_VD, labels_P, temperature, dtype, entropy)
    slices = [
        checkpoint(
            rows, hidden, head_VD, labels, temperature, dtype, entropy, use_reentrant=False, preserve_rng_state=False
        )
        for hidden, labels in zip(hidden_PD.split(chunk_rows), labels_P.split(chunk_rows), strict=True)
    ]
    logprobs, entropies = zip(*slices, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)
