"""Steps of samplers of a flow: from noise (sigma = 1) to a sample (sigma = 0), with log-probabilities where a step is drawn.

The model's velocity v points from the sample to the noise: x_sigma = (1 - sigma) x_0 + sigma noise, v = noise - x_0. Log-probabilities are means
over the dimensions of a sample, as in Flow-GRPO (arXiv:2505.05470), so that they do not grow with its size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

STOCHASTIC = ("flow", "dance", "ddim")
"""Solvers whose steps are drawn, where noise_level is above 0."""
_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True)
class Step:
    """Where a step goes: a Gaussian, [N, ...], of one deviation; 0: it is no draw.

    Attributes:
        clean: x_0 as the model predicts it.
    """

    mean: torch.Tensor
    std: float
    clean: torch.Tensor

    def logprob(self, chosen: torch.Tensor) -> torch.Tensor:
        """Return the mean log-density [N] of what was drawn; 0 where nothing was."""
        if self.std == 0:
            return self.mean.new_zeros(len(self.mean), dtype=torch.float32)
        return self.log_density(chosen).flatten(1).mean(1)

    def log_density(self, chosen: torch.Tensor) -> torch.Tensor:
        """Return the log-density [N, ...] of each number that was drawn; there is a draw."""
        squared = (chosen.detach().float() - self.mean.float()).square() / (2 * self.std**2)
        return -squared - math.log(self.std) - _HALF_LOG_2PI

    def draw(self, noise: torch.Tensor | None) -> torch.Tensor:
        """Return a draw, given noise like `mean`; None: the mean."""
        return self.mean if noise is None or self.std == 0 else self.mean + self.std * noise


def flow_step(velocity: torch.Tensor, x: torch.Tensor, sigmas: list[float], at: int, eta: float) -> Step:
    """Return the step of Flow-GRPO's SDE (arXiv:2505.05470, equation 9), whose noise is eta sqrt(sigma / (1 - sigma)).

    At sigma = 1 the noise is that of the next level, since it would be infinite.

    Args:
        sigmas: falling noise levels, of which the step goes from `at` to the next one.
    """
    sigma, dt = sigmas[at], sigmas[at + 1] - sigmas[at]
    std = eta * math.sqrt(sigma / (1 - (sigmas[1] if sigma == 1 else sigma)))
    share = std**2 / (2 * sigma)
    mean = x * (1 + share * dt) + velocity * (1 + share * (1 - sigma)) * dt
    return Step(mean, std * math.sqrt(-dt), x - sigma * velocity)


def dance_step(velocity: torch.Tensor, x: torch.Tensor, sigmas: list[float], at: int, eta: float) -> Step:
    """Return the step of DanceGRPO's SDE (arXiv:2505.07818, equation 8), whose noise is eta sqrt(d sigma)."""
    sigma, dt = sigmas[at], sigmas[at + 1] - sigmas[at]
    clean = x - sigma * velocity
    score = -(x - clean * (1 - sigma)) / sigma**2
    return Step(x + dt * velocity - 0.5 * eta**2 * score * dt, eta * math.sqrt(-dt), clean)


def ddim_step(velocity: torch.Tensor, x: torch.Tensor, sigmas: list[float], at: int, eta: float) -> Step:
    """Return the step of DDIM (arXiv:2010.02502, equation 12) on the path of a flow: eta = 0 draws nothing, 1 as much as the forward process."""
    return ddim_to(x - sigmas[at] * velocity, x, sigmas, at, eta)


def ddim_to(clean: torch.Tensor, x: torch.Tensor, sigmas: list[float], at: int, eta: float) -> Step:
    """Return the same step, given the predicted sample in place of the velocity."""
    sigma, following = sigmas[at], sigmas[at + 1]
    std = eta * following * ddim_scale(sigmas, at)
    noise = (x - (1 - sigma) * clean) / sigma
    return Step((1 - following) * clean + math.sqrt(following**2 - std**2) * noise, std, clean)


def ddim_scale(sigmas: list[float], at: int) -> float:
    """Return sqrt(1 - (ratio of signal to noise before and after the step)^2)."""
    sigma, following = sigmas[at], sigmas[at + 1]
    return math.sqrt(1 - (following * (1 - sigma) / (sigma * (1 - following))) ** 2)


STEPS: dict[str, Callable[[torch.Tensor, torch.Tensor, list[float], int, float], Step]] = {
    "flow": flow_step,
    "dance": dance_step,
    "ddim": ddim_step,
}


def dpm_step(clean: list[torch.Tensor], x: torch.Tensor, sigmas: list[float], at: int, order: int) -> torch.Tensor:
    """Return where DPM-Solver++ (arXiv:2211.01095, algorithm 2) goes, of order 1 or with the model's last two predictions.

    Args:
        clean: predictions of x_0, the newest one last.
        order: 1 or 2. The first step and the last, to sigma = 0, have order 1 in any case.
    """
    sigma, following = sigmas[at], sigmas[at + 1]
    predicted = clean[-1]
    # at sigma = 1 there is no signal, so that the logarithm of its ratio to the noise, and the first step's length, are infinite
    if order == 2 and at > 0 and following > 0 and sigmas[at - 1] < 1:
        before, here, after = (_log_snr(each) for each in sigmas[at - 1 : at + 2])
        ratio = (here - before) / (after - here)
        predicted = predicted + (predicted - clean[-2]) / (2 * ratio)
    shrink = following / sigma
    return shrink * x + (1 - following - shrink * (1 - sigma)) * predicted


def _log_snr(sigma: float) -> float:
    return math.log(1 - sigma) - math.log(sigma)


@dataclass(frozen=True)
class Path:
    """What a sampler went through with N samples.

    Attributes:
        latents: [S + 1] of [N, ...], from the noise to the sample.
        logprobs: [S] of [N], of each step; 0 where it is no draw.
    """

    latents: list[torch.Tensor]
    logprobs: list[torch.Tensor]


Velocity = Callable[[torch.Tensor, float], torch.Tensor]
"""(x [N, ...], sigma) -> velocity [N, ...]."""
Noise = Callable[[torch.Tensor], torch.Tensor]
"""Draws noise like a tensor."""


def sample(
    velocity: Velocity, x: torch.Tensor, sigmas: list[float], solver: str, eta: float, noise: Noise | None = None
) -> Path:
    """Return the way from noise to samples.

    Args:
        x: noise, [N, ...].
        sigmas: [S + 1], falling to 0.
        solver: flow, dance, ddim, dpm1 or dpm2.
        eta: noise of the stochastic solvers.
        noise: None: nothing is drawn on the way, and the ODE is integrated.
    """
    latents, logprobs, clean = [x], list[torch.Tensor](), list[torch.Tensor]()
    for at in range(len(sigmas) - 1):
        v = velocity(x, sigmas[at]).to(x.dtype)
        if solver in STEPS and noise is not None:
            step = STEPS[solver](v, x, sigmas, at, eta)
            x = step.draw(noise(x))
            logprobs.append(step.logprob(x))
        else:
            clean = [*clean[-1:], x - sigmas[at] * v]
            x = dpm_step(clean, x, sigmas, at, 2 if solver == "dpm2" else 1)
            logprobs.append(x.new_zeros(len(x), dtype=torch.float32))
        latents.append(x)
    return Path(latents, logprobs)
