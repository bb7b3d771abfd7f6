"""The loss of a run: policy loss, KL to the reference, entropy, put together from the algorithms that the configuration names.

All of it as sums over the mask; the engine divides once, by the token count of the whole mini-batch.
"""

from __future__ import annotations

import torch

from hpcrl.algorithms.kl import KL_ESTIMATORS
from hpcrl.algorithms.losses import POLICY_LOSSES, masked_sum, ratio
from hpcrl.config.algorithm import AlgorithmConfig
from hpcrl.trainer.engine import Objective
from hpcrl.types import MicroBatch


def build_objective(algorithm: AlgorithmConfig) -> Objective:
    """Return what turns a micro-batch and the policy's log-probabilities into loss and metric sums.

    Without old log-probabilities the policy is its own old policy: exact where a batch makes one optimizer step.
    """
    assert algorithm.loss_reduction == "token_mean", "sums divided by the mini-batch's tokens are its token mean"
    policy_loss = POLICY_LOSSES[algorithm.policy_loss_type]
    kl = KL_ESTIMATORS[algorithm.kl_estimator_type] if algorithm.use_kl_loss else None
    clip = {"eps_clip_low": algorithm.eps_clip_low, "eps_clip_high": algorithm.eps_clip_high}

    def objective(
        batch: MicroBatch, logprobs_P: torch.Tensor, entropies_P: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mask_P = batch.loss_mask
        old_P = logprobs_P.detach() if batch.old_logprobs is None else batch.old_logprobs
        loss_P, sums = policy_loss(logprobs_P, old_P, batch.advantages, mask_P, **clip)
        loss = policy = masked_sum(loss_P, mask_P)
        entropy = masked_sum(entropies_P, mask_P)
        if algorithm.use_entropy_loss:
            loss = loss - algorithm.entropy_loss_coef * entropy
        if kl is not None:
            assert batch.ref_logprobs is not None
            divergence = masked_sum(kl(logprobs_P, batch.ref_logprobs), mask_P)
            loss = loss + algorithm.kl_loss_coef * divergence
            sums["policy_kl"] = divergence
        difference_P = (old_P - batch.rollout_logprobs).abs()
        sums |= {
            "tokens": mask_P.sum(),
            "final_loss": loss,
            "policy_loss": policy,
            "entropy": entropy,
            "ratio": masked_sum(ratio(logprobs_P, old_P), mask_P),
            "abs_diff": masked_sum(difference_P, mask_P),
            "abs_diff_squared": masked_sum(difference_P.square(), mask_P),
        }
        return loss, {name: value.detach() for name, value in sums.items()}

    return objective
