"""Section `trainer.algorithm`: advantages and loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    advantage_estimator: Literal["grpo"] = "grpo"
    """How rewards become advantages."""

    grpo_norm_by_std: bool = True
    """Divide a group's advantages by the standard deviation of its rewards."""

    policy_loss_type: Literal["regular"] = "regular"
    """Policy loss; regular: the clipped surrogate of PPO."""

    loss_reduction: Literal["token_mean"] = "token_mean"
    """How the loss of tokens becomes one number; token_mean: mean over all trained tokens of the mini-batch."""

    eps_clip_low: float = 0.2
    """Probability ratios below 1 - eps_clip_low are clipped."""

    eps_clip_high: float = 0.2
    """Probability ratios above 1 + eps_clip_high are clipped."""

    use_kl_loss: bool = True
    """Add the KL divergence from the reference model to the loss; it costs a second model."""

    kl_loss_coef: float = 0.001
    """Weight of the KL loss."""

    kl_estimator_type: Literal["k3"] = "k3"
    """Estimator of the KL divergence from sampled tokens."""

    use_entropy_loss: bool = False
    """Subtract the policy's entropy from the loss; the entropy is reported either way."""

    entropy_loss_coef: float = 0.01
    """Weight of the entropy."""

    temperature: float | None = None
    """Divides the logits in training; unset: generator.sampling_params.temperature."""
