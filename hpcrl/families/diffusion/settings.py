"""Derived settings of a diffusion policy."""

from __future__ import annotations

from hpcrl.config.sections.trainer import TrainerConfig


def trains_by_nft(trainer: TrainerConfig) -> bool:
    """Return whether DiffusionNFT trains samples with new noise, so that probabilities of steps are not needed."""
    return trainer.policy.diffusers.enable and not trainer.offline and trainer.policy.diffusers.algorithm == "nft"
