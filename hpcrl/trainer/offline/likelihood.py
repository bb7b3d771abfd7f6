"""Supervised fine-tuning: the loss of a mini-batch, and what a validation set is measured by."""

from __future__ import annotations

import torch

from hpcrl.algorithms.losses import masked_sum, sample_sums, widened
from hpcrl.algorithms.reductions import weighted_sum
from hpcrl.trainer.backends.base import Objective
from hpcrl.trainer.packing import PackedSamples
from hpcrl.types import MicroBatch


def build_likelihood_objective() -> Objective:
    """Return the objective of supervised fine-tuning: the cross entropy of the trained tokens."""

    def objective(
        batch: MicroBatch, logprobs_P: torch.Tensor, entropies_P: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mask_P = batch.loss_mask
        loss = weighted_sum(-widened(logprobs_P), batch.weights)
        sums = {
            "tokens": mask_P.sum(),
            "samples": (sample_sums(mask_P, mask_P, batch.cu_seqlens.diff()) > 0).sum(),
            "final_loss": loss,
            "policy_loss": loss,
            "entropy": masked_sum(entropies_P, mask_P),
        }
        return loss, {name: value.detach() for name, value in sums.items()}

    return objective


class LikelihoodMeasure:
    """Measure (modes.py) of supervised fine-tuning: the loss, a mean over trained tokens."""

    def sums(self, samples: PackedSamples, logprobs_P: torch.Tensor) -> dict[str, float]:
        mask_P = samples.loss_mask.double()
        return {"loss": -(logprobs_P.double() * mask_P).sum().item(), "tokens": mask_P.sum().item()}

    def means(self, sums: dict[str, float]) -> dict[str, float]:
        return {"loss": sums["loss"] / sums["tokens"]}
