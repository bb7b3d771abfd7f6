"""Actions by a flow, as of pi0.5: which noise each step of the way adds, and the log-probability of each action of a chunk.

A chunk of H actions with D numbers goes from noise (sigma = 1) to what is done (sigma = 0) in S steps, each a Gaussian (hpcrl/algorithms/diffusion/samplers.py).
A robot with fewer numbers than D does without the last ones, which have no part in the probability. An action's, given the path, is the
mean over the steps of the sum over its numbers, so that bounds on ratios do not depend on the number of steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from hpcrl.algorithms.diffusion.samplers import Step, flow_step

_HALF_LOG_2PI_E = 0.5 * math.log(2 * math.pi * math.e)


def cps_step(velocity: torch.Tensor, x: torch.Tensor, sigmas: list[float], at: int, eta: float) -> Step:
    """Return the step of Flow-CPS (arXiv:2509.05952), which keeps the share of noise: sigma' (cos(eta pi / 2) predicted + sin(eta pi / 2) new).

    The last step, to sigma = 0, is no draw. Arguments as of `flow_step`.
    """
    sigma, following = sigmas[at], sigmas[at + 1]
    clean, noise = x - sigma * velocity, x + (1 - sigma) * velocity
    angle = eta * math.pi / 2
    return Step((1 - following) * clean + following * math.cos(angle) * noise, following * math.sin(angle), clean)


STEPS: dict[str, Callable[[torch.Tensor, torch.Tensor, list[float], int, float], Step]] = {
    "flow_sde": flow_step,
    "flow_cps": cps_step,
}
"""By vla.pi05.noise_method."""


def noise_levels(steps: int) -> list[float]:
    """Return the sigmas [S + 1] of a way of S steps of one length."""
    return [1 - at / steps for at in range(steps)] + [0.0]


def walk(
    velocity: Callable[[torch.Tensor, float], torch.Tensor],
    noise: torch.Tensor,
    steps: int,
    method: str,
    level: float,
    draw: Callable[[torch.Tensor], torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the way [N, S + 1, H, D] from noise to actions, and the velocities [N, S, H, D] on it.

    Args:
        velocity: (x, sigma) -> velocity, [N, H, D].
        noise: [N, H, D].
        draw: draws noise like its argument; None: nothing is drawn on the way, and the ODE is integrated by Euler's method.
    """
    sigmas, x = noise_levels(steps), noise
    way, velocities = [x], list[torch.Tensor]()
    for at in range(steps):
        velocities.append(velocity(x, sigmas[at]))
        if draw is None:
            x = x + (sigmas[at + 1] - sigmas[at]) * velocities[-1]
        else:
            x = STEPS[method](velocities[-1], x, sigmas, at, level).draw(draw(x))
        way.append(x)
    return torch.stack(way, 1), torch.stack(velocities, 1)


def action_logprobs(
    velocities: torch.Tensor, path: torch.Tensor, sizes: torch.Tensor, method: str, level: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probability [N, H] float32 of each action of chunks that were drawn, and its entropy [N, H], in nats.

    Args:
        velocities: [N, S, H, D] on the way, with gradient.
        path: [N, S + 1, H, D], the way that was gone.
        sizes: [N] int, how many of the D numbers the robot has.
    """
    steps = velocities.shape[1]
    sigmas = noise_levels(steps)
    counts_ND = torch.arange(path.shape[-1], device=path.device) < sizes[:, None]
    logprobs = velocities.new_zeros(path.shape[0], path.shape[2])
    entropies, drawn = torch.zeros_like(logprobs), 0
    for at in range(steps):
        step = STEPS[method](velocities[:, at], path[:, at], sigmas, at, level)
        if step.std == 0:
            continue
        drawn += 1
        logprobs = logprobs + torch.where(counts_ND[:, None], step.log_density(path[:, at + 1]), 0.0).sum(-1)
        entropies = entropies + sizes[:, None] * (_HALF_LOG_2PI_E + math.log(step.std))
    return logprobs / drawn, entropies / drawn
