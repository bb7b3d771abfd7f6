"""Policy losses per token, from log-probabilities.

A loss gives [P] values and the sums of its own metrics over the mask. Who calls it sums over the mask and divides once, by the
token count of the whole mini-batch, so a loss does not depend on packing, micro-batch size or number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_MAX_LOG_RATIO = 20.0


def masked_sum(values_P: torch.Tensor, mask_P: torch.Tensor) -> torch.Tensor:
    """Return the sum of `values_P` where `mask_P` is not 0, in float32; a NaN outside the mask does no harm."""
    return torch.where(mask_P > 0, values_P.float(), 0.0).sum()


def ratio(logprobs_P: torch.Tensor, old_logprobs_P: torch.Tensor) -> torch.Tensor:
    """Return pi / pi_old per token, its logarithm clamped to [-20, 20]."""
    return (logprobs_P - old_logprobs_P).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def clipped_surrogate(
    logprobs_P: torch.Tensor,
    old_logprobs_P: torch.Tensor,
    advantages_P: torch.Tensor,
    mask_P: torch.Tensor,
    *,
    eps_clip_low: float,
    eps_clip_high: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return PPO's clipped surrogate loss (arXiv:1707.06347, equation 7; two bounds as in DAPO, arXiv:2503.14476).

    -min(r A, clip(r, 1 - eps_clip_low, 1 + eps_clip_high) A) with r = pi / pi_old.

    Args:
        logprobs_P: [P], carries the gradient; the others do not.
        mask_P: [P], 0 where the policy did not choose the token.

    Returns:
        loss [P], and the sum of `clip_ratio`: tokens for which the clipped branch is the larger loss.
    """
    shapes = {tensor.shape for tensor in (logprobs_P, old_logprobs_P, advantages_P, mask_P)}
    assert len(shapes) == 1, f"all arguments have one shape, not {shapes}"
    ratio_P = ratio(logprobs_P, old_logprobs_P)
    plain_P = -ratio_P * advantages_P
    clipped_P = -ratio_P.clamp(1 - eps_clip_low, 1 + eps_clip_high) * advantages_P
    clipped = masked_sum((clipped_P > plain_P).float(), mask_P)
    return torch.maximum(plain_P, clipped_P), {"clip_ratio": clipped.detach()}


POLICY_LOSSES: dict[str, Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]] = {"regular": clipped_surrogate}
