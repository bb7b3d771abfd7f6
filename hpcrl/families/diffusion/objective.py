"""Objectives of diffusion policies, on the outputs of their tasks (hpcrl/families/diffusion/tasks.py)."""

from __future__ import annotations

import torch

from hpcrl.algorithms.diffusion.nft import nft_loss, optimality
from hpcrl.algorithms.losses import masked_sum, sample_sums
from hpcrl.algorithms.reductions import weighted_sum
from hpcrl.config.sections.trainer import TrainerConfig
from hpcrl.families.diffusion.settings import trains_by_nft
from hpcrl.trainer.backends.base import Objective
from hpcrl.trainer.loss import LOSS_METRICS, build_objective
from hpcrl.types import MicroBatch

NFT_BOUND = 5.0
"""Of advantages, where trainer.algorithm.advantage_clip_low and advantage_clip_high are not set."""


def diffusion_objective(trainer: TrainerConfig) -> Objective:
    """Return the objective of the policy."""
    return build_nft_objective(trainer) if trains_by_nft(trainer) else build_objective(trainer.algorithm)


def build_nft_objective(trainer: TrainerConfig) -> Objective:
    """Return DiffusionNFT's objective, whose outputs are those of `NftTask`, [P] each."""
    algorithm, beta = trainer.algorithm, trainer.policy.diffusers.nft_beta
    low = -NFT_BOUND if algorithm.advantage_clip_low is None else algorithm.advantage_clip_low
    high = NFT_BOUND if algorithm.advantage_clip_high is None else algorithm.advantage_clip_high

    def objective(
        batch: MicroBatch, positive_P: torch.Tensor, negative_P: torch.Tensor, divergence_P: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        assert batch.advantages is not None
        mask_P = batch.loss_mask
        policy = weighted_sum(nft_loss(positive_P, negative_P, batch.advantages, low, high, beta), batch.weights)
        loss = policy
        if algorithm.use_kl_loss:
            loss = policy + algorithm.kl_loss_coef * weighted_sum(divergence_P, batch.weights)
        optimal_P = optimality(batch.advantages, low, high)
        sums = {
            **_counts(batch),
            "final_loss": loss,
            "policy_loss": policy,
            f"{LOSS_METRICS}positive": masked_sum(positive_P, mask_P),
            f"{LOSS_METRICS}negative": masked_sum(negative_P, mask_P),
            f"{LOSS_METRICS}optimality": masked_sum(optimal_P, mask_P),
            # nobody asked an engine for probabilities that these could be compared with
            "current_tokens": torch.zeros_like(mask_P.sum()),
        }
        sums |= {"policy_kl": masked_sum(divergence_P, mask_P)} if algorithm.use_kl_loss else {}
        return loss, {name: value.detach() for name, value in sums.items()}

    return objective


def _counts(batch: MicroBatch) -> dict[str, torch.Tensor]:
    mask_P = batch.loss_mask
    samples = (sample_sums(mask_P, mask_P, batch.cu_seqlens.diff()) > 0).sum()
    return {"tokens": mask_P.sum(), "samples": samples}
