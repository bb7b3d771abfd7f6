"""Supervised flow matching (arXiv:2210.02747): which noise levels are trained, what is predicted at them, and how much each counts.

Densities and weights as of Stable Diffusion 3 (arXiv:2403.03206, section 3.1), by their names in diffusers.
"""

from __future__ import annotations

import math

import torch

from hpcrl.algorithms.diffusion.nft import noised

SCHEMES = ("logit_normal", "mode", "cosmap", "sigma_sqrt", "none")
_MODE_SCALE = 1.29


def draw_times(
    scheme: str, count: int, mean: float, std: float, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Return noise levels [count] in (0, 1), float32 and on the CPU.

    Args:
        scheme: logit_normal draws sigmoid(N(mean, std)) (equation 19), mode with more weight on the middle (equation 20), the others
            uniformly.
    """
    if scheme == "logit_normal":
        return torch.sigmoid(mean + std * torch.randn(count, generator=generator))
    u = torch.rand(count, generator=generator)
    if scheme == "mode":
        return 1 - u - _MODE_SCALE * ((math.pi / 2 * u).cos() ** 2 - 1 + u)
    return u


def loss_weights(scheme: str, t: torch.Tensor) -> torch.Tensor:
    """Return how much the error at each noise level [N] counts: sigma_sqrt t^-2, cosmap 2 / (pi (1 - 2 t + 2 t^2)), else 1."""
    if scheme == "sigma_sqrt":
        return t**-2.0
    if scheme == "cosmap":
        return 2 / (math.pi * (1 - 2 * t + 2 * t**2))
    return torch.ones_like(t)


def flow_matching_loss(
    velocity: torch.Tensor, clean: torch.Tensor, noise: torch.Tensor, t: torch.Tensor, scheme: str
) -> torch.Tensor:
    """Return the weighted mean squared error [N] of a velocity [N, ...] from noise - x_0, the direction of the path that `noised` is on."""
    error = (velocity.float() - (noise - clean).float()).square().flatten(1).mean(1)
    return loss_weights(scheme, t).to(error) * error


__all__ = ["SCHEMES", "draw_times", "flow_matching_loss", "loss_weights", "noised"]
