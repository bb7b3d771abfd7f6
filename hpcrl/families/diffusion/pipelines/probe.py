"""Probe of a diffusion transformer: a few numbers of a velocity, by which engine and trainer are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hpcrl.families.diffusion.pipelines.kinds import Conditions

if TYPE_CHECKING:
    import torch

_T = 0.5


def probe_velocity(
    velocity: Callable[[torch.Tensor, torch.Tensor, Conditions], torch.Tensor],
    latent_shape: Sequence[int],
    idle: Conditions,
    token_ids: Sequence[int],
) -> list[float]:
    """Return as many numbers of the velocity as there are tokens but the first.

    Args:
        velocity: (x, t, conditions) -> velocity.
        latent_shape: of one sample.
        idle: conditions of no prompt; what is real of them is drawn.
        token_ids: the first one is the seed of what is drawn.
    """
    import torch

    generator = torch.Generator().manual_seed(token_ids[0])
    x = torch.randn((1, *latent_shape), generator=generator)
    drawn = {
        name: torch.randn(value.shape, generator=generator) if value.is_floating_point() else value
        for name, value in idle.items()
    }
    found = velocity(x, torch.full((1,), _T), drawn).flatten().float().cpu()
    return [float(found[at % len(found)]) for at in range(len(token_ids) - 1)]
