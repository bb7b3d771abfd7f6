"""Learning from pairs: the loss of a mini-batch, and the measure of a validation set.

The loss is the mean over the pairs of the whole mini-batch, independent of packing, micro-batches and ranks: each pair has the weight of
both its samples together. The likelihood of the chosen answers (loss_type "sft") is the mean over their trained tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hpcrl.algorithms.losses import masked_sum, sample_means, widened
from hpcrl.algorithms.preferences import LIKELIHOOD, Pairs, loss_weights, pair_loss, pair_metrics
from hpcrl.algorithms.reductions import Reduction, weighted_sum
from hpcrl.config.sections.dpo import DPOConfig
from hpcrl.trainer.backends.base import Objective
from hpcrl.trainer.packing import PackedRows
from hpcrl.types import MicroBatch

PER_PAIR = "per_pair/"
"""Begins the names of sums that are reported as means over pairs."""
PAIRS_REDUCTION = Reduction("seq_mean_token_sum")
"""Gives each sample its share of a mean over samples."""


def build_preference_objective(dpo: DPOConfig) -> Objective:
    """Return the objective of a mini-batch of pairs, whose samples have the weights of `PAIRS_REDUCTION`."""
    likelihood_weight = loss_weights(dpo).get(LIKELIHOOD, 0.0)

    def objective(
        batch: MicroBatch, logprobs_P: torch.Tensor, entropies_P: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mask_P, lengths_B, logprobs_P = batch.loss_mask, batch.cu_seqlens.diff(), widened(logprobs_P)
        assert batch.ref_logprobs is not None or not dpo.uses_reference, "the reference was not asked"
        pairs = Pairs.of(logprobs_P, batch.ref_logprobs if dpo.uses_reference else None, mask_P, lengths_B)
        count = len(pairs.chosen)
        weights_N = sample_means(batch.weights, mask_P, lengths_B)[: 2 * count].view(count, 2).sum(1)
        loss = (weights_N * pair_loss(pairs, dpo)).sum()
        likelihood = weighted_sum(-logprobs_P, batch.nll_weights)
        loss = loss + likelihood_weight * likelihood
        sums = {
            "tokens": mask_P.sum(),
            "samples": mask_P.new_full((), 2 * count),
            "pairs": mask_P.new_full((), count),
            "final_loss": loss,
            "policy_loss": loss,
            "entropy": masked_sum(entropies_P, mask_P),
            **{PER_PAIR + name: values_N.sum() for name, values_N in pair_metrics(pairs, dpo).items()},
        }
        if likelihood_weight:
            sums["positive_nll"] = likelihood
        return loss, {name: value.detach() for name, value in sums.items()}

    return objective


@dataclass(frozen=True)
class PreferenceMeasure:
    """Measure (build.py) of a set of pairs: the trained loss, and `pair_metrics`, as means over the set."""

    dpo: DPOConfig

    def sums(self, samples: PackedRows, logprobs_P: torch.Tensor) -> dict[str, float]:
        lengths_B = torch.tensor(samples.lengths, dtype=torch.int64)
        pairs = Pairs.of(logprobs_P.double(), samples.scores.ref_logprobs, samples.loss_mask, lengths_B)
        values = {"loss": pair_loss(pairs, self.dpo), "nll": -pairs.chosen, "tokens": pairs.chosen_tokens}
        summed = {name: values_N.sum().item() for name, values_N in (values | pair_metrics(pairs, self.dpo)).items()}
        return summed | {"pairs": float(len(pairs.chosen))}

    def means(self, sums: dict[str, float]) -> dict[str, float]:
        rest = dict(sums)
        pairs, nll = rest.pop("pairs"), rest.pop("nll") / rest.pop("tokens")
        means = {name: value / pairs for name, value in rest.items()}
        return means | {"loss": means["loss"] + loss_weights(self.dpo).get(LIKELIHOOD, 0.0) * nll}
