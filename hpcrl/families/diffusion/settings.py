"""What follows from the settings of a diffusion policy."""

from __future__ import annotations

from hpcrl.config.derive import is_offline
from hpcrl.config.sections.diffusers import DiffusersConfig
from hpcrl.config.sections.trainer import TrainerConfig


def is_diffusion(trainer: TrainerConfig) -> bool:
    """Return whether the policy is a pipeline of diffusers."""
    return trainer.policy.diffusers.enable


def trained_steps(diffusers: DiffusersConfig) -> int:
    """Return how many denoising steps of each sample are trained."""
    return max(1, int(diffusers.sample.num_steps * diffusers.timesteps_fraction))


def trains_by_nft(trainer: TrainerConfig) -> bool:
    """Return whether new noise is drawn for samples and DiffusionNFT trains them, so that nothing needs the probabilities of their steps."""
    return is_diffusion(trainer) and not is_offline(trainer) and trainer.policy.diffusers.algorithm == "nft"


def draws_steps(diffusers: DiffusersConfig) -> bool:
    """Return whether a sampler draws its steps, so that they have probabilities."""
    return not diffusers.sample.deterministic_sampling and diffusers.sample.noise_level > 0
