"""Supervised flow matching (arXiv:2210.02747): how far a velocity is from the straight path between a sample and its noise.

Which noise levels are trained, and how much the error at each counts, is as of Stable Diffusion 3 (arXiv:2403.03206, section 3.1), computed by diffusers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

_MODE_SCALE = 1.29
"""Of the density "mode", diffusers' own."""


def draw_levels(
    levels_L: torch.Tensor, scheme: str, count: int, mean: float, std: float, generator: torch.Generator
) -> torch.Tensor:
    """Return noise levels [count] that are trained.

    Args:
        levels_L: those of the schedule, from noise to clean.
        scheme: density that a place among them is drawn from: logit_normal is sigmoid(N(mean, std)) (equation 19), mode equation 20, the
            others are uniform.
    """
    from diffusers.training_utils import compute_density_for_timestep_sampling

    named = cast("Callable[..., torch.Tensor]", compute_density_for_timestep_sampling)
    places = named(scheme, count, logit_mean=mean, logit_std=std, mode_scale=_MODE_SCALE, generator=generator)
    return levels_L[(places * len(levels_L)).long().clamp(max=len(levels_L) - 1)]


def flow_matching_loss(velocity: torch.Tensor, target: torch.Tensor, t: torch.Tensor, scheme: str) -> torch.Tensor:
    """Return the mean squared error [N] of a velocity, weighted.

    Args:
        velocity: [N, ...], with gradient.
        target: noise - x_0 [N, ...], the direction of the path that `noised` (nft.py) is on.
        t: noise levels [N].
        scheme: sigma_sqrt weighs with t^-2, cosmap with 2 / (pi (1 - 2 t + 2 t^2)), the others with 1.
    """
    from diffusers.training_utils import compute_loss_weighting_for_sd3

    error = (velocity.float() - target.float()).square().flatten(1).mean(1)
    return cast("Any", compute_loss_weighting_for_sd3)(scheme, t.float()) * error
