"""What follows from the settings of a diffusion policy."""

from __future__ import annotations

from hpcrl.config.sections.trainer import TrainerConfig


def trains_by_nft(trainer: TrainerConfig) -> bool:
    """Return whether new noise is drawn for samples and DiffusionNFT trains them, so that nothing needs the probabilities of their steps."""
    return trainer.policy.diffusers.enable and not trainer.offline and trainer.policy.diffusers.algorithm == "nft"
