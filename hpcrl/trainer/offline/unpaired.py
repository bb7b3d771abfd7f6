"""Learning from single answers, each desirable or undesirable: the loss of a mini-batch, and the measure of a validation set.

The loss is the mean over the answers of the whole mini-batch, independent of packing, micro-batches and ranks. Labels, and what log-ratios
are compared with, come from hpcrl/trainer/scoring/labels.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hpcrl.algorithms.losses import masked_sum, sample_means, sample_sums, widened
from hpcrl.algorithms.preferences import unpaired_loss
from hpcrl.config.sections.dpo import DPOConfig
from hpcrl.trainer.backends.base import Objective
from hpcrl.trainer.packing import PackedRows
from hpcrl.types import MicroBatch

_PARTS = {"chosen": "desirable", "rejected": "undesirable"}
"""Ends of TRL's names of metrics -> the answers that they are means over."""


def build_unpaired_objective(dpo: DPOConfig) -> Objective:
    """Return the objective of a mini-batch of answers, which have the weights of `PAIRS_REDUCTION`."""

    def objective(
        batch: MicroBatch, logprobs_P: torch.Tensor, entropies_P: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mask_P, lengths_B = batch.loss_mask, batch.cu_seqlens.diff()
        assert batch.ref_logprobs is not None, "the reference was not asked"
        assert batch.desirable is not None, "answers have no labels"
        assert batch.shifts is not None
        starts_B = batch.cu_seqlens[:-1].long()
        answers = _Answers.of(widened(logprobs_P), batch.ref_logprobs, mask_P, lengths_B, batch.desirable[starts_B])
        shifts_B = batch.shifts[starts_B]
        losses_B = unpaired_loss(answers.ratios, answers.desirable, shifts_B, dpo)
        loss = (sample_means(batch.weights, mask_P, lengths_B) * losses_B).sum()
        sums = {
            "tokens": mask_P.sum(),
            "samples": answers.there.sum(),
            "final_loss": loss,
            "policy_loss": loss,
            "entropy": masked_sum(entropies_P, mask_P),
            "kto_kl": (shifts_B * answers.there).sum(),
            **answers.sums(dpo.beta),
        }
        return loss, {name: value.detach() for name, value in sums.items()}

    return objective


@dataclass(frozen=True)
class UnpairedMeasure:
    """Measure (build.py) of a set of answers: the trained loss compared with 0 instead of mismatched answers, and metrics of training."""

    dpo: DPOConfig

    def sums(self, samples: PackedRows, logprobs_P: torch.Tensor) -> dict[str, float]:
        scores, lengths_B = samples.scores, torch.tensor(samples.lengths, dtype=torch.int64)
        assert scores.ref_logprobs is not None
        assert scores.desirable is not None
        desirable_B = scores.desirable[lengths_B.cumsum(0) - lengths_B]
        answers = _Answers.of(logprobs_P.double(), scores.ref_logprobs, samples.loss_mask, lengths_B, desirable_B)
        losses_B = unpaired_loss(answers.ratios, answers.desirable, torch.zeros_like(answers.ratios), self.dpo)
        found = {"loss": losses_B.sum(), "samples": answers.there.sum(), **answers.sums(self.dpo.beta)}
        return {name: value.item() for name, value in found.items()}

    def means(self, sums: dict[str, float]) -> dict[str, float]:
        return {"loss": sums["loss"] / sums["samples"], **answer_means(sums)}


@dataclass(frozen=True)
class _Answers:
    """Answers of a micro-batch, [B] each.

    Attributes:
        logprobs: sums over the trained tokens of log π.
        ratios: the same less log π_ref; they carry the gradient.
        there: 1, or 0 for a row without a trained token, which is no answer.
    """

    logprobs: torch.Tensor
    ratios: torch.Tensor
    desirable: torch.Tensor
    there: torch.Tensor

    @classmethod
    def of(
        cls,
        logprobs_P: torch.Tensor,
        ref_logprobs_P: torch.Tensor,
        mask_P: torch.Tensor,
        lengths_B: torch.Tensor,
        desirable_B: torch.Tensor,
    ) -> _Answers:
        logprobs_B, ref_B, tokens_B = (
            sample_sums(values_P, mask_P, lengths_B) for values_P in (logprobs_P, ref_logprobs_P, mask_P)
        )
        return cls(logprobs_B, logprobs_B - ref_B, desirable_B, (tokens_B > 0).to(logprobs_B.dtype))

    def sums(self, beta: float) -> dict[str, torch.Tensor]:
        """Return counts of both kinds of answers, and sums over each of rewards β (log π - log π_ref) and of log-probabilities."""
        kinds = {"desirable": self.desirable * self.there, "undesirable": (1 - self.desirable) * self.there}
        found = {kind: chosen_B.sum() for kind, chosen_B in kinds.items()}
        for name, kind in _PARTS.items():
            found[f"rewards/{name}"] = (kinds[kind] * beta * self.ratios).sum()
            found[f"logps/{name}"] = (kinds[kind] * self.logprobs).sum()
        return found


def answer_means(sums: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of answers with labels from sums over a mini-batch or a set, by TRL's names; none where answers have none.

    A kind of answers of which there is none has no metric.
    """
    found = {
        f"{metric}/{name}": sums[f"{metric}/{name}"] / sums[kind]
        for name, kind in _PARTS.items()
        for metric in ("rewards", "logps")
        if sums.get(kind)
    }
    if {"rewards/chosen", "rewards/rejected"} <= found.keys():
        found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
    if "kto_kl" in sums:
        found["policy/kto_kl"] = sums["kto_kl"] / max(sums["samples"], 1.0)
    return found


def by_row(rows: PackedRows, values_B: Sequence[float]) -> torch.Tensor:
    """Return [P] float32: the value of each row at all its tokens."""
    return torch.tensor(values_B, dtype=torch.float32).repeat_interleave(torch.tensor(rows.lengths, dtype=torch.int64))
