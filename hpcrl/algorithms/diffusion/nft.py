"""DiffusionNFT (arXiv:2509.16117): a velocity field is fitted to what good samples were made of, and away from what bad ones were.

No probability of a sample is needed: its final latents are noised again. The loss is that of flow matching for two implicit velocity
fields, one on each side of the sampling field.
"""

from __future__ import annotations

import torch

_LEAST = 1e-5
"""Of the mean error that an error is divided by."""


def noised(clean: torch.Tensor, noise: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """Return x_t = (1 - t) x_0 + t noise, the straight path of flow matching (arXiv:2210.02747).

    Args:
        clean, noise: [N, ...].
        t: [N], from 0 (clean) to 1 (noise).
    """
    t = _broadcast(t, clean)
    return (1 - t) * clean + t * noise


def optimality(advantages: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Return r in [0, 1], how much of a sample is to be learned: (clip(A, low, high) / high + 1) / 2, clipped (equation 13).

    Args:
        advantages: [N].
    """
    return (advantages.clamp(low, high) / high / 2 + 0.5).clamp(0, 1)


def implicit_losses(
    velocity: torch.Tensor,
    old_velocity: torch.Tensor,
    clean: torch.Tensor,
    noisy: torch.Tensor,
    t: torch.Tensor,
    beta: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the losses [N] of the positive and of the negative implicit velocity field.

    v+ = (1 - beta) v_old + beta v and v- = (1 + beta) v_old - beta v. The error of each is that of its predicted sample, x_t - t v,
    squared and divided by the sample's mean absolute error. The divisor has no gradient (the paper's adaptive weight).

    Args:
        velocity, old_velocity: [N, ...], of what is trained and of what samples were made with; only the first gets a gradient.
        clean, noisy: [N, ...], the sample and what `noised` made of it.
        t: [N].
        beta: strength, trainer.policy.diffusers.nft_beta.
    """
    old_velocity = old_velocity.detach()
    positive = beta * velocity + (1 - beta) * old_velocity
    negative = (1 + beta) * old_velocity - beta * velocity
    return _weighted_error(positive, clean, noisy, t), _weighted_error(negative, clean, noisy, t)


def nft_loss(
    positive_N: torch.Tensor, negative_N: torch.Tensor, advantages_N: torch.Tensor, low: float, high: float, beta: float
) -> torch.Tensor:
    """Return the policy loss [N]: high (r loss+ + (1 - r) loss-) / beta, with the two of `implicit_losses`.

    The factor `high` undoes the division of `optimality`, so that a larger bound does not train less.
    """
    r = optimality(advantages_N, low, high)
    return high * (r * positive_N + (1 - r) * negative_N) / beta


def velocity_divergence(velocity: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return the mean squared difference [N] of two velocity fields, [N, ...]: the KL divergence of their steps but for a factor of t alone."""
    return (velocity - reference.detach()).square().flatten(1).mean(1)


def _weighted_error(velocity: torch.Tensor, clean: torch.Tensor, noisy: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    predicted = noisy - _broadcast(t, noisy) * velocity
    error = (predicted - clean).double().flatten(1)  # differences of nearly equal numbers
    weight = error.detach().abs().mean(1, keepdim=True).clamp(min=_LEAST)
    return (error.square() / weight).mean(1)


def _broadcast(values_N: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values_N.to(like).view(-1, *[1] * (like.dim() - 1))
