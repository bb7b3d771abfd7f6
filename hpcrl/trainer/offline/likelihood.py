"""Supervised fine-tuning: the loss of a mini-batch, and the measure of a validation set."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from hpcrl.algorithms.likelihood import LIKELIHOOD_LOSSES
from hpcrl.algorithms.losses import masked_sum, sample_sums
from hpcrl.algorithms.reductions import weighted_sum
from hpcrl.config.sections.distillation import DistillationConfig
from hpcrl.config.sections.sft import SFTConfig
from hpcrl.rundir.layout import Run
from hpcrl.trainer.backends.base import Objective, PolicyEngine
from hpcrl.trainer.loss import TEACHER_DIVERGENCE, mixed, teacher_divergence
from hpcrl.trainer.offline.teacher_file import open_teacher_file
from hpcrl.trainer.packing import Before, MiniBatch, PackedRows
from hpcrl.types import Batch, MicroBatch


def build_likelihood_objective(sft: SFTConfig, distillation: DistillationConfig) -> Objective:
    """Return the objective of supervised fine-tuning: the loss of the trained tokens, and with a teacher the divergence from it.

    (1 - w) loss + w divergence, with w = trainer.distillation.loss_weight (knowledge distillation, G. Hinton et al., arXiv:1503.02531).
    """
    token_loss = LIKELIHOOD_LOSSES[sft.loss_type]

    def objective(
        batch: MicroBatch, logprobs_P: torch.Tensor, entropies_P: torch.Tensor, top_PK: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mask_P, taught = batch.loss_mask, dict[str, torch.Tensor]()
        loss = likelihood = weighted_sum(token_loss(logprobs_P), batch.weights)
        if distillation.enable:
            divergence_P = teacher_divergence(batch, top_PK, distillation.jsd_beta)
            loss = mixed(likelihood, divergence_P, batch.weights, distillation.loss_weight)
            taught = {TEACHER_DIVERGENCE: masked_sum(divergence_P, mask_P)}
        sums = {
            "tokens": mask_P.sum(),
            "samples": (sample_sums(mask_P, mask_P, batch.cu_seqlens.diff()) > 0).sum(),
            "final_loss": loss,
            "policy_loss": likelihood,
            "entropy": masked_sum(entropies_P, mask_P),
        }
        return loss, {name: value.detach() for name, value in (sums | taught).items()}

    return objective


def score_by_teacher(
    batch: Batch, mini: MiniBatch, policy: PolicyEngine, distillation: DistillationConfig, before: Before
) -> None:
    """Fill in the teacher's most probable tokens at each trained token of this rank's rows.

    The teacher is in the place of the reference, or was run before (distillation.precomputed_logprobs).

    Args:
        batch: that the mini-batch is of.
        before: called before each forward pass.
    """
    scores, top_k = mini.rows.scores, min(distillation.top_k, policy.vocabulary)
    if distillation.precomputed_logprobs is not None:
        written = Run(Path(distillation.precomputed_logprobs))
        scores.teacher_ids, scores.teacher_top = _written(batch, mini.rows, written, top_k)
        return
    teacher = partial(policy.top_logprobs, reference=True)
    _, scores.teacher_ids, scores.teacher_top = mini.scored_top(teacher, top_k, before)


def _written(batch: Batch, samples: PackedRows, written: Run, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, start = len(samples.token_ids), 0
    ids_PK, top_PK = torch.zeros(tokens, top_k, dtype=torch.int32), torch.zeros(tokens, top_k)
    for ref, length in zip(samples.refs, samples.lengths, strict=True):
        group, part = batch.groups[ref.group], slice(start, start + length)
        assert group.row is not None, "a row of a dataset"
        file = open_teacher_file(written.teacher_file(Path(group.path).name))
        ids, top = file.read(group.row, group.digest, top_k)
        where, start = start + (samples.loss_mask[part] > 0).nonzero()[:, 0], part.stop
        ids_PK[where], top_PK[where] = torch.tensor(ids), torch.tensor(top)
    return ids_PK, top_PK


class LikelihoodMeasure:
    """Measure (build.py) of supervised fine-tuning: the cross entropy, a mean over trained tokens."""

    def sums(self, samples: PackedRows, logprobs_P: torch.Tensor) -> dict[str, float]:
        mask_P = samples.loss_mask.double()
        return {"loss": -(logprobs_P.double() * mask_P).sum().item(), "tokens": mask_P.sum().item()}

    def means(self, sums: dict[str, float]) -> dict[str, float]:
        return {"loss": sums["loss"] / sums["tokens"]}
