"""Section `trainer.algorithm`: advantages, losses, corrections, filters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

LogprobDtype = Literal["fp32", "bf16", "fp16"]
ADVANTAGE_ESTIMATORS = ("grpo", "gae", "rloo", "reinforce++", "maxrl")
POLICY_LOSSES = (
    "regular",
    "dual_clip",
    "gspo",
    "sapo",
    "cispo",
    "rollout_is",
    "clip_cov",
    "kl_cov",
    "cross_entropy",
    "importance_sampling",
    "aipo",
)


@dataclass(frozen=True, kw_only=True)
class KLControllerConfig:
    type: Literal["fixed", "adaptive"] = "fixed"
    """Whether the weight of the KL in the reward stays kl_loss_coef or follows kl_target."""

    kl_target: float = 0.1
    """KL that the adaptive controller aims at."""

    horizon: int = 10000
    """Samples over which the adaptive controller corrects (Ziegler et al., arXiv:1909.08593)."""


@dataclass(frozen=True, kw_only=True)
class OffPolicyCorrectionConfig:
    tis_ratio_type: Literal["token", "sequence"] | None = None
    """Multiply the loss by min(exp(old - rollout log-probability), cap), per token or over the sample; unset: do not."""

    token_tis_ratio_clip_high: float = 2.0
    """Cap of the token's weight."""

    sequence_tis_ratio_clip_high: float = 5.0
    """Cap of the sample's weight."""

    token_tis_ratio_drop_high: float | None = None
    """Tokens whose weight is above this count nothing, instead of the cap."""

    sequence_mask_metric: Literal["product", "geometric"] | None = None
    """Leave out samples whose ratio, a product over tokens or its geometric mean, is out of bounds; unset: none."""

    geo_mask_high: float = 1.01
    """Upper bound of the geometric mean."""

    geo_mask_low: float = 0.99
    """Lower bound of the geometric mean."""

    product_mask_high: float = 2.0
    """Upper bound of the product."""

    product_mask_low: float = 0.5
    """Lower bound of the product."""

    outlier_token_is_threshold_low: float | None = None
    """Leave out samples with a token whose ratio is below this."""

    outlier_token_is_threshold_high: float | None = None
    """Leave out samples with a token whose ratio is above this."""

    token_mask_is_threshold_low: float | None = None
    """Leave out tokens whose ratio is below this; needs the upper bound too."""

    token_mask_is_threshold_high: float | None = None
    """Leave out tokens whose ratio is above this; needs the lower bound too."""

    negative_sample_mask_delta: float | None = None
    """Leave out samples of negative advantage whose mean old - new log-probability is above this (DeepSeek-V3.2)."""


@dataclass(frozen=True, kw_only=True)
class SAPOConfig:
    tau_pos: float = 1.0
    """Temperature of the gate for positive advantages."""

    tau_neg: float = 1.05
    """Temperature of the gate for other advantages."""


@dataclass(frozen=True, kw_only=True)
class DynamicSamplingConfig:
    type: Literal["filter", "replace"] | None = None
    """What happens to groups whose rewards are all equal; filter: generate others (DAPO), replace: repeat good ones (POLARIS), unset: they are trained."""

    max_sample_batches: int = 30
    """Batches that may be generated for one step before the run fails; 0 or less: no bound."""

    min_replace_ratio: float = 0.3
    """replace: share of good groups above which a batch is used."""


@dataclass(frozen=True, kw_only=True)
class ClipCovConfig:
    clip_ratio: float = 0.0002
    """Share of the tokens that is left out, at least one token."""

    clip_cov_lb: float = 1.0
    """Lower bound of the covariance of tokens that may be left out."""

    clip_cov_ub: float = 5.0
    """Upper bound of that covariance."""


@dataclass(frozen=True, kw_only=True)
class KLCovConfig:
    kl_cov_frac: float = 0.2
    """Share of the tokens, those of largest covariance, that get the KL term."""

    ppo_kl_coef: float = 1.0
    """Weight of that term."""


@dataclass(frozen=True, kw_only=True)
class CISPOConfig:
    cispo_eps_clip_low: float = 0.0
    """Weights below 1 minus this are raised to it."""

    cispo_eps_clip_high: float = 5.0
    """Weights above 1 plus this are lowered to it."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    advantage_estimator: str = "grpo"
    """How rewards become advantages: grpo, gae, rloo, reinforce++, maxrl, or your own as "package.module:function"."""

    grpo_norm_by_std: bool = True
    """Divide a group's advantages by the standard deviation of its rewards (false: Dr.GRPO, arXiv:2503.20783)."""

    advantage_batch_normalize: bool = False
    """Standardize advantages over the whole batch."""

    advantage_clip_low: float | None = None
    """Advantages below this are raised to it."""

    advantage_clip_high: float | None = None
    """Advantages above this are lowered to it."""

    gamma: float = 1.0
    """Discount of later rewards, for gae and reinforce++."""

    lambd: float = 1.0
    """Lambda of gae (arXiv:1506.02438)."""

    policy_loss_type: str = "regular"
    """Policy loss: regular (the clipped surrogate of PPO, arXiv:1707.06347), dual_clip, gspo, sapo, cispo, rollout_is, clip_cov, kl_cov, cross_entropy, importance_sampling, aipo, or your own as "package.module:function"."""

    loss_reduction: Literal[
        "token_mean",
        "token_mean_legacy",
        "sequence_mean",
        "seq_mean_token_sum",
        "seq_mean_token_sum_norm",
        "seq_mean_token_mean",
        "token_sum",
        "prompt_mean",
    ] = "token_mean"
    """How the loss of tokens becomes one number; token_mean: mean over all trained tokens of the mini-batch."""

    max_seq_len: int | None = None
    """Divisor of seq_mean_token_sum_norm in tokens; unset: generator.max_input_length + max_generate_length."""

    unbiased_loss_max_tokens: int | None = None
    """Divisor of seq_mean_token_mean in tokens, instead of each sample's own length (Dr.GRPO)."""

    eps_clip_low: float = 0.2
    """Probability ratios below 1 - eps_clip_low are clipped; 1: none."""

    eps_clip_high: float = 0.2
    """Probability ratios above 1 + eps_clip_high are clipped."""

    clip_ratio_c: float = 3.0
    """dual_clip: the loss of a token of negative advantage A is at most clip_ratio_c * |A| (arXiv:1912.09729)."""

    aipo_rho: float = 2.0
    """aipo: upper bound of the probability ratio, the only one of this loss."""

    positive_nll_coef: float | None = None
    """Weight of the negative log-likelihood of samples with positive reward (VAPO, arXiv:2504.05118)."""

    use_rollout_logprobs_for_loss: bool = False
    """The rollout's log-probabilities stand for the old policy; saves a forward pass."""

    use_kl_loss: bool = True
    """Add the KL divergence from the reference model to the loss; it costs a second model."""

    use_kl_in_reward: bool = False
    """Subtract the KL divergence from the reward of each token."""

    kl_loss_coef: float = 0.001
    """Weight of the KL divergence, in the loss or in the reward."""

    kl_estimator_type: Literal["k1", "k2", "k3", "abs"] = "k3"
    """Estimator of the KL divergence from sampled tokens."""

    kl_importance_weighted: bool = False
    """Multiply the estimate by the ratio of new to old probability, which makes its gradient unbiased."""

    kl_ctrl: KLControllerConfig = field(default_factory=KLControllerConfig)

    reference_reset_interval: int | None = None
    """Steps between resets of the reference to the current policy; unset: never."""

    reset_optimizer_with_reference: bool = True
    """Start with a fresh optimizer state after such a reset."""

    use_entropy_loss: bool = False
    """Subtract the policy's entropy from the loss; the entropy is reported either way."""

    entropy_loss_coef: float = 0.01
    """Weight of the entropy."""

    temperature: float | None = None
    """Divides the logits in training; unset: generator.sampling_params.temperature."""

    logprob_dtype: LogprobDtype = "fp32"
    """Type in which logits become log-probabilities."""

    value_head_prefix: str = "value_head"
    """Name of the critic's output layer."""

    value_clip: float = 0.2
    """The critic's prediction may move by this much per update; 0: by any amount."""

    zero_variance_filter: bool = False
    """Leave groups whose rewards are all equal out of the loss."""

    filter_reward_metric: list[str] = field(default_factory=list)
    """Rewards whose sum decides whether a group's rewards are all equal; empty: the reward itself."""

    min_filter_prefix_tokens: int | None = None
    """Leave the common beginning of samples of one group with different rewards out of the loss if it has this many tokens; unset: never."""

    off_policy_correction: OffPolicyCorrectionConfig = field(default_factory=OffPolicyCorrectionConfig)

    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)

    sapo: SAPOConfig = field(default_factory=SAPOConfig)

    clip_cov: ClipCovConfig = field(default_factory=ClipCovConfig)

    kl_cov: KLCovConfig = field(default_factory=KLCovConfig)

    cispo: CISPOConfig = field(default_factory=CISPOConfig)
