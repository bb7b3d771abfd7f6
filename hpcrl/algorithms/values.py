"""The loss of a critic: how far its values are from the returns."""

from __future__ import annotations

import torch

from hpcrl.algorithms.losses import Values, masked_sum, widened


def clipped_value_loss(
    values_P: torch.Tensor,
    old_values_P: torch.Tensor,
    returns_P: torch.Tensor,
    mask_P: torch.Tensor,
    *,
    value_clip: float,
) -> Values:
    """Return max((V - R)^2, (clip(V, V_old - value_clip, V_old + value_clip) - R)^2) / 2 per token.

    The bound keeps a value near the one that advantages were estimated with, as in PPO's first implementation (described in
    arXiv:2005.12729, section 3).

    Args:
        values_P: of the critic; carries the gradient, the others do not.
        old_values_P: of the critic that the update began with.
        value_clip: 0: no bound.

    Returns:
        loss [P], and the sum of `clipfrac`: tokens for which the bound makes the larger loss.
    """
    values_P, old_values_P, returns_P = widened(values_P), widened(old_values_P), widened(returns_P)
    loss_P = (values_P - returns_P).square()
    clipped_P = old_values_P + (values_P - old_values_P).clamp(-value_clip, value_clip)
    bounded_P = (clipped_P - returns_P).square() if value_clip > 0 else loss_P
    return torch.maximum(loss_P, bounded_P) / 2, {"clipfrac": masked_sum((bounded_P > loss_P).float(), mask_P)}
