"""The loss of a run: policy loss, its correction, KL to the reference and entropy, as the configuration names them.

Each term is a sum of weighted tokens, reduced by trainer.algorithm.loss_reduction, the KL term too. SkyRL reduces the KL term by the mean
over tokens of each sample, then over the samples of a micro-batch, with every reduction.
"""

from __future__ import annotations

from functools import partial

import torch

from hpcrl.algorithms.distillation import jensen_shannon, teacher_advantages
from hpcrl.algorithms.kl import KL_ESTIMATORS
from hpcrl.algorithms.losses import POLICY_LOSSES, LossTokens, Values, masked_sum, ratio, sample_sums, widened
from hpcrl.algorithms.off_policy import correct, is_enabled, proximal_logprobs
from hpcrl.algorithms.reductions import Reduction, weighted_sum
from hpcrl.algorithms.settings import configured
from hpcrl.config.sections.algorithm import AlgorithmConfig
from hpcrl.config.sections.distillation import DistillationConfig
from hpcrl.trainer.backends.base import Objective
from hpcrl.types import MicroBatch

LOSS_METRICS = "loss_metrics/"
TEACHER_DIVERGENCE = "teacher_divergence"
MISMATCH = "mismatch/"
MISMATCH_RANGE = (-8.0, 2.0)
"""Powers of ten of the differences, in nats, between log-probabilities of engines and trainer, binned in a histogram."""
_MISMATCH_BINS = 20


def build_reduction(algorithm: AlgorithmConfig, max_seq_len: int) -> Reduction:
    """Return how the loss of a mini-batch becomes one number.

    Args:
        max_seq_len: as worked out from the whole configuration.
    """
    return Reduction(
        algorithm.loss_reduction,
        max_seq_len=max_seq_len,
        max_tokens=algorithm.unbiased_loss_max_tokens,
    )


def build_policy_loss(algorithm: AlgorithmConfig) -> partial[Values]:
    """Return the policy loss of the configuration with its settings: tokens -> loss [P], and sums of metrics."""
    return configured("policy_loss_type", algorithm.policy_loss_type, POLICY_LOSSES, algorithm)


def build_objective(algorithm: AlgorithmConfig, distillation: DistillationConfig | None = None) -> Objective:
    """Return the objective: a micro-batch and the policy's log-probabilities give loss and metric sums.

    Without old log-probabilities, and without what they are estimated by, the policy is its own old policy: exact where a batch makes one optimizer
    step. Where the micro-batch has the teacher's tokens, the divergence over these is subtracted from advantages here, because it is
    differentiated itself. Beside the policy loss it is a term of weight trainer.distillation.loss_weight.

    Args:
        distillation: None without a teacher.
    """
    policy_loss, corrected = build_policy_loss(algorithm), is_enabled(algorithm.off_policy_correction)

    def objective(
        batch: MicroBatch, logprobs_P: torch.Tensor, entropies_P: torch.Tensor, top_PK: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        assert batch.advantages is not None
        advantages_P, divergence_P = batch.advantages, None
        if distillation is not None and distillation.enable and distillation.top_k:
            divergence_P = teacher_divergence(batch, top_PK, distillation.jsd_beta)
            advantages_P = _less(batch, divergence_P, distillation)
        old_P = batch.rollout_logprobs if algorithm.use_rollout_logprobs_for_loss else _old_logprobs(batch, logprobs_P)
        mask_P = batch.loss_mask
        tokens = LossTokens(logprobs_P, old_P, batch.rollout_logprobs, advantages_P, mask_P, batch.cu_seqlens.diff())
        loss_P, metrics = policy_loss(tokens)
        if corrected:
            correction = correct(tokens, algorithm.off_policy_correction)
            loss_P, metrics = correction.of(loss_P), metrics | correction.sums
        if (
            algorithm.top_entropy_quantile < 1
        ):  # ranks add up their metrics: those of a micro-batch without rows are the same
            selected_P = mask_P if batch.selected is None else batch.selected
            loss_P = torch.where(selected_P > 0, loss_P, 0.0)
            metrics = metrics | {"selected": selected_P.sum()}
        policy = weighted_sum(loss_P, batch.weights)
        loss, taught = policy, dict[str, torch.Tensor]()
        if divergence_P is not None and distillation is not None:
            loss = mixed(policy, divergence_P, batch.weights, distillation.loss_weight)
            taught = {TEACHER_DIVERGENCE: masked_sum(divergence_P, mask_P)}
        loss, sums = _added_terms(algorithm, batch, tokens, entropies_P, loss)
        ratio_P = ratio(tokens.logprobs, tokens.old_logprobs)
        metrics = {"ratio": masked_sum(ratio_P, mask_P), **metrics}
        difference_P = (tokens.old_logprobs - tokens.rollout_logprobs).abs()
        current_P = torch.zeros_like(mask_P) if batch.current is None else batch.current
        apart_P = (logprobs_P.detach() - batch.rollout_logprobs).abs()
        sums |= {f"{LOSS_METRICS}{name}": value for name, value in metrics.items()}
        sums |= taught | {
            "tokens": mask_P.sum(),
            "samples": (sample_sums(mask_P, mask_P, tokens.lengths) > 0).sum(),
            "final_loss": loss,
            "policy_loss": policy,
            "entropy": masked_sum(entropies_P, mask_P),
            "abs_diff": masked_sum(difference_P, mask_P),
            "abs_diff_squared": masked_sum(difference_P.square(), mask_P),
            **_binned(difference_P, mask_P),
            "current_tokens": current_P.sum(),
            "current_abs_diff": masked_sum(apart_P, current_P),
            "current_abs_diff_squared": masked_sum(apart_P.square(), current_P),
        }
        return loss, {name: value.detach() for name, value in sums.items()}

    return objective


def _old_logprobs(batch: MicroBatch, logprobs_P: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities of the policy that the update began with, [P]: given, estimated, or those of the policy itself."""
    if batch.old_logprobs is not None:
        return batch.old_logprobs
    if batch.staleness is not None:
        return proximal_logprobs(widened(logprobs_P.detach()), batch.rollout_logprobs, batch.staleness)
    return logprobs_P.detach()


def _binned(difference_P: torch.Tensor, mask_P: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return how many trained tokens have their difference's power of ten in each bin of MISMATCH_RANGE; the ends take what lies beyond.

    Neither histc, which deterministic algorithms refuse, nor anything that waits for the device.
    """
    low, high = MISMATCH_RANGE
    places_P = ((difference_P.log10() - low) / (high - low) * _MISMATCH_BINS).nan_to_num().clamp(0, _MISMATCH_BINS - 1)
    bins_K1 = torch.arange(_MISMATCH_BINS, device=places_P.device).unsqueeze(1)
    counts_K = ((places_P.floor() == bins_K1) * mask_P).sum(1)
    return {f"{MISMATCH}{at:02d}": count for at, count in enumerate(counts_K.unbind())}


def teacher_divergence(batch: MicroBatch, top_PK: torch.Tensor | None, beta: float) -> torch.Tensor:
    """Return the divergence from the teacher over the tokens that it is compared at, [P], differentiable; 0 where there is no teacher.

    Args:
        top_PK: log-probabilities of these tokens by the policy; None in a micro-batch without samples.
        beta: as of `jensen_shannon`.
    """
    if top_PK is None:
        assert batch.lengths == [1], "samples without tokens that their teacher is compared at"
        return torch.zeros_like(batch.loss_mask)
    assert batch.teacher_top is not None
    assert batch.teacher_ids is not None
    known_P = (batch.loss_mask > 0) & (batch.teacher_ids[:, 0] >= 0)
    return torch.where(known_P, jensen_shannon(top_PK, batch.teacher_top, beta), 0.0)


def mixed(loss: torch.Tensor, divergence_P: torch.Tensor, weights_P: torch.Tensor, weight: float) -> torch.Tensor:
    """Return (1 - weight) loss + weight divergence, which is reduced over the whole mini-batch as the loss is."""
    return (1 - weight) * loss + weight * weighted_sum(divergence_P, weights_P) if weight else loss


def _less(batch: MicroBatch, divergence_P: torch.Tensor, distillation: DistillationConfig) -> torch.Tensor:
    assert batch.advantages is not None
    return teacher_advantages(
        batch.advantages, divergence_P, batch.loss_mask, batch.lengths,
        kl_penalty_coef=distillation.kl_penalty_coef, kl_discount_factor=distillation.kl_discount_factor,
    )  # fmt: skip


def _added_terms(
    algorithm: AlgorithmConfig, batch: MicroBatch, tokens: LossTokens, entropies_P: torch.Tensor, loss: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss with entropy, KL and likelihood of positive samples and of observations, as far as they are switched on, and their metrics."""
    sums: dict[str, torch.Tensor] = {}
    if algorithm.use_entropy_loss:
        loss = loss - algorithm.entropy_loss_coef * weighted_sum(entropies_P, batch.weights)
    if algorithm.use_kl_loss:
        assert batch.ref_logprobs is not None
        weight_P = ratio(tokens.logprobs, tokens.old_logprobs) if algorithm.kl_importance_weighted else 1.0
        divergence_P = KL_ESTIMATORS[algorithm.kl_estimator_type](tokens.logprobs, batch.ref_logprobs, weight_P)
        loss = loss + algorithm.kl_loss_coef * weighted_sum(divergence_P, batch.weights)
        sums["policy_kl"] = masked_sum(divergence_P, tokens.mask)
    if algorithm.positive_nll_coef is not None:
        likelihood = weighted_sum(-tokens.logprobs, batch.nll_weights)
        loss = loss + algorithm.positive_nll_coef * likelihood
        sums["positive_nll"] = likelihood
    if algorithm.observation_nll_coef is not None:
        assert batch.observation_weights is not None
        likelihood = weighted_sum(-tokens.logprobs, batch.observation_weights)
        loss = loss + algorithm.observation_nll_coef * likelihood
        sums["observation_nll"] = likelihood
    return loss, sums
