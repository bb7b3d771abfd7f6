"""Section `trainer.algorithm`: advantages, losses, corrections, filters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hpcrl.config.conditions import CRITIC, RL_OR_SFT
from hpcrl.config.effects import OTHER_MODEL
from hpcrl.config.setting import (
    COUNT,
    FINITE,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    SHARE_BELOW_1,
    Range,
    When,
    any_of,
    section,
    setting,
    when,
)

LogprobDtype = Literal["fp32", "bf16", "fp16"]
OWN_REWARD = "reward"
"""In gdpo.rewards: the reward of the sample itself."""
ADVANTAGE_ESTIMATORS = ("grpo", "rloo", "maxrl", "opo", "remax", "gdpo", "reinforce++", "reinforce++_baseline", "gae")
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
    "dppo",
    "gpg",
    "gmpo",
    "vespo",
    "dro",
    "m2po",
)


@dataclass(frozen=True, kw_only=True)
class KLControllerConfig:
    type: Literal["fixed", "adaptive"] = setting(
        "fixed",
        used_by=when(
            "trainer.algorithm.use_kl_in_reward", needs="trainer.algorithm.use_kl_in_reward, whose weight it adapts"
        ),
    )
    """Weight of the KL divergence in the reward (use_kl_in_reward): fixed at kl_loss_coef, or adapted from there on so that the divergence approaches kl_target."""

    kl_target: float = setting(0.1, range=POSITIVE, used_by=when(".type", "adaptive"))
    """KL divergence that the adaptive controller aims at, in nats per token."""

    horizon: int = setting(10000, range=COUNT, used_by=when(".type", "adaptive"))
    """Time constant of the adaptive controller in samples: n samples change the weight by at most 0.2 * n / horizon of itself, a batch by at most 0.2 (arXiv:1909.08593)."""


@dataclass(frozen=True, kw_only=True)
class OffPolicyCorrectionConfig:
    tis_ratio_type: Literal["token", "sequence"] | None = None
    """Multiply the loss by the ratio of a token's, or a whole sample's, old to rollout probability, capped; unset: do not. What is left out or weighs less still counts in the means of loss_reduction, with this and all other corrections."""

    token_tis_ratio_clip_high: float = setting(2.0, range=POSITIVE, used_by=when(".tis_ratio_type", "token"))
    """Cap of the ratio with tis_ratio_type=token."""

    sequence_tis_ratio_clip_high: float = setting(5.0, range=POSITIVE, used_by=when(".tis_ratio_type", "sequence"))
    """Cap of the product of a sample's ratios with tis_ratio_type=sequence."""

    token_tis_ratio_drop_high: float | None = setting(None, range=POSITIVE, used_by=when(".tis_ratio_type", "token"))
    """Tokens whose ratio is above this count nothing, instead of as much as the cap; needs tis_ratio_type=token."""

    sequence_mask_metric: Literal["product", "geometric"] | None = None
    """Leave out samples whose ratio of old to rollout probability, the product over tokens or their geometric mean, is out of bounds; unset: none."""

    geo_mask_high: float = setting(1.01, range=POSITIVE, used_by=when(".sequence_mask_metric", "geometric"))
    """Upper bound of the geometric mean; the bound itself is in."""

    geo_mask_low: float = setting(0.99, range=NOT_NEGATIVE, used_by=when(".sequence_mask_metric", "geometric"))
    """Lower bound of the geometric mean; the bound itself is in."""

    product_mask_high: float = setting(2.0, range=POSITIVE, used_by=when(".sequence_mask_metric", "product"))
    """Upper bound of the product; the bound itself is in."""

    product_mask_low: float = setting(0.5, range=NOT_NEGATIVE, used_by=when(".sequence_mask_metric", "product"))
    """Lower bound of the product; the bound itself is in."""

    outlier_token_is_threshold_low: float | None = setting(None, range=NOT_NEGATIVE)
    """Leave out samples with a token whose ratio is below this; unset: none."""

    outlier_token_is_threshold_high: float | None = setting(None, range=POSITIVE)
    """Leave out samples with a token whose ratio is above this; unset: none."""

    token_mask_is_threshold_low: float | None = setting(None, range=NOT_NEGATIVE)
    """Leave out tokens whose ratio is below this; needs the upper bound too."""

    token_mask_is_threshold_high: float | None = setting(None, range=POSITIVE)
    """Leave out tokens whose ratio is above this; needs the lower bound too."""

    token_mask_kl_threshold: float | None = setting(None, range=POSITIVE)
    """Leave out tokens whose binary KL divergence between old policy and rollout, of this token against all others, is above this in one direction or the other, in nats (KPop, whose authors use 0.1); unset: none."""

    negative_sample_mask_delta: float | None = None
    """Leave out samples of negative advantage whose log-probability fell by more than this, in nats per token on average, since the old policy, or since the rollout with tis_ratio_type (DeepSeek-V3.2); unset: none."""


@dataclass(frozen=True, kw_only=True)
class SAPOConfig:
    tau_pos: float = setting(1.0, range=POSITIVE)
    """sapo: steepness of the gate around ratio 1 for positive advantages (arXiv:2511.20347)."""

    tau_neg: float = setting(1.05, range=POSITIVE)
    """sapo: the same for other advantages; above tau_pos: they are damped sooner."""


@dataclass(frozen=True, kw_only=True)
class DynamicSamplingConfig:
    type: Literal["filter", "replace"] | None = None
    """What happens to groups of several samples whose rewards are all equal; filter: another prompt is generated instead (DAPO, arXiv:2503.14476), replace: other groups of the batch take their places (POLARIS), unset: they are trained. trainer.epochs sets the number of steps as without it."""

    max_sample_batches: int = setting(30, used_by=when(".type"))
    """How many times a batch of groups may be generated for one step; the run fails if these do not yield one batch. 0 or less: no bound."""

    min_replace_ratio: float = setting(0.3, range=SHARE_BELOW_1, used_by=when(".type", "replace"))
    """replace: share of groups with different rewards that a batch must exceed to be used; otherwise it is generated again."""


@dataclass(frozen=True, kw_only=True)
class ClipCovConfig:
    clip_ratio: float = setting(0.0002, range=SHARE)
    """clip_cov: share of the tokens of a micro-batch that is left out, drawn at random, at least one token (arXiv:2505.22617)."""

    clip_cov_lb: float = 1.0
    """clip_cov: tokens may be left out whose covariance of advantage and log-probability is above this."""

    clip_cov_ub: float = 5.0
    """clip_cov: and below this."""


@dataclass(frozen=True, kw_only=True)
class KLCovConfig:
    kl_cov_frac: float = setting(0.2, range=SHARE)
    """kl_cov: share of the tokens of a micro-batch, those of largest covariance of advantage and log-probability, that get a KL term (arXiv:2505.22617)."""

    ppo_kl_coef: float = setting(1.0, range=NOT_NEGATIVE)
    """kl_cov: weight of that term, |new - old log-probability|."""


@dataclass(frozen=True, kw_only=True)
class CISPOConfig:
    cispo_eps_clip_low: float = setting(0.0, range=SHARE)
    """cispo: probability ratios below 1 - cispo_eps_clip_low are raised to that bound (arXiv:2506.13585)."""

    cispo_eps_clip_high: float = setting(5.0, range=NOT_NEGATIVE)
    """cispo: probability ratios above 1 + cispo_eps_clip_high are lowered to that bound."""


@dataclass(frozen=True, kw_only=True)
class DPPOConfig:
    dppo_type: Literal["binary_tv", "binary_kl"] = "binary_tv"
    """dppo: divergence of the policy from the rollout, of this token against all others; binary_tv: difference of the probabilities, binary_kl: KL(rollout || policy) in nats (arXiv:2602.04879)."""

    delta_low: float = setting(0.2, range=NOT_NEGATIVE)
    """dppo: tokens of negative advantage count nothing once the policy has fallen from the rollout by a divergence above this; 0.05 is usual with binary_kl."""

    delta_high: float = setting(0.2, range=NOT_NEGATIVE)
    """dppo: the same for tokens of positive advantage and a policy that has risen."""


@dataclass(frozen=True, kw_only=True)
class GMPOConfig:
    log_clip_low: float = setting(0.4, range=NOT_NEGATIVE)
    """gmpo: logarithms of probability ratios below -log_clip_low are raised to it, where the advantage is negative (arXiv:2507.20673)."""

    log_clip_high: float = setting(0.4, range=NOT_NEGATIVE)
    """gmpo: those above log_clip_high are lowered to it, where the advantage is positive."""


@dataclass(frozen=True, kw_only=True)
class VESPOConfig:
    k_pos: float = setting(2.0, range=NOT_NEGATIVE)
    """vespo: exponent of a sample's probability ratio to the rollout in its weight, for advantages that are not negative; the larger it is, the less count samples that have become rare (arXiv:2602.10693)."""

    lambda_pos: float = setting(3.0, range=NOT_NEGATIVE)
    """vespo: rate at which the weight falls for these where the ratio is large."""

    k_neg: float = setting(3.0, range=NOT_NEGATIVE)
    """vespo: the exponent for negative advantages."""

    lambda_neg: float = setting(2.0, range=NOT_NEGATIVE)
    """vespo: the rate for negative advantages."""


@dataclass(frozen=True, kw_only=True)
class DROConfig:
    beta: float = setting(1.0, range=NOT_NEGATIVE)
    """dro: weight of the squared logarithm of the probability ratio to the rollout, half of which is added to the loss (arXiv:2405.19107); a token is drawn to the logarithm A / beta, so that it belongs to the size of the advantages, about 1 with grpo."""


@dataclass(frozen=True, kw_only=True)
class M2POConfig:
    threshold: float = setting(0.04, range=POSITIVE)
    """m2po: what the mean of the squared logarithms of probability ratios to the rollout may be at most, over tokens that move away from it; the largest are left out until it is (arXiv:2510.01161)."""


@dataclass(frozen=True, kw_only=True)
class GDPOConfig:
    rewards: dict[str, float] = setting({})
    """gdpo: named rewards, or metrics of the environment, with their weights, such as {correct = 1.0, format = 0.3}; `reward` is that of the sample itself. An advantage estimator of your own finds them in `named_B`."""


def _with(name: str, *values: str) -> When:
    """Return the condition that a setting of the section has one of some values."""
    return when(f".{name}", *values, needs=f"{{section}}.{name}={' or '.join(values)}")


_DISCOUNTS = any_of(
    _with("advantage_estimator", "gae", "reinforce++"),
    CRITIC,
    needs="{section}.advantage_estimator=gae or reinforce++, or a critic",
)
_REFERENCE = when("uses_reference", needs="{section}.use_kl_loss or use_kl_in_reward")


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    advantage_estimator: str = "grpo"
    """How rewards become advantages: grpo (against the group's mean, arXiv:2402.03300), rloo (against the mean of the group's other samples, arXiv:2402.14740), maxrl (as grpo, but divided by the mean of the group, arXiv:2602.02710), opo (against the group's mean weighted by length, arXiv:2505.23585), remax (against the greedy response to the same prompt, which is generated beside the group, arXiv:2310.10505), gdpo (several rewards, each against its group's mean by itself, arXiv:2601.05242), reinforce++ (rewards from each token on, discounted, standardized over the batch, arXiv:2501.03262), reinforce++_baseline (against the group's mean, standardized over the batch), gae (against a critic, arXiv:1506.02438), or your own as "package.module:function"."""

    grpo_norm_by_std: bool = setting(True, used_by=_with("advantage_estimator", "grpo"))
    """grpo: divide a group's advantages by the standard deviation of its rewards (false: Dr.GRPO, arXiv:2503.20783)."""

    advantage_batch_normalize: bool = False
    """Standardize advantages over all trained tokens of the batch."""

    advantage_clip_low: float | None = None
    """Advantages below this are raised to it; unset: none."""

    advantage_clip_high: float | None = None
    """Advantages above this are lowered to it; unset: none."""

    gamma: float = setting(1.0, range=SHARE, used_by=_DISCOUNTS)
    """gae, reinforce++ and what a critic learns: discount of a reward per trained token that it comes later."""

    lambd: float = setting(1.0, range=SHARE, used_by=CRITIC)
    """gae, and what a critic learns: lambda; 1: advantages from all later rewards, 0: from the next value alone."""

    policy_loss_type: str = "regular"
    """Policy loss: regular (the clipped surrogate of PPO, arXiv:1707.06347), dual_clip (also bounded for negative advantages, arXiv:1912.09729), gspo (one ratio per sample, arXiv:2507.18071), sapo (a soft gate, arXiv:2511.20347), cispo (clipped weights, arXiv:2506.13585), rollout_is (ratio to the rollout, out of bounds: no weight), clip_cov and kl_cov (arXiv:2505.22617), aipo (ratio bounded on one side, arXiv:2505.24034), dppo (ratio to the rollout, inside a bound on the divergence, arXiv:2602.04879), gmpo (geometric mean of a sample's ratios, arXiv:2507.20673; the paper's loss_reduction is sequence_mean), vespo (a smooth weight by the ratio of whole samples, arXiv:2602.10693), dro (no ratio, and a squared penalty, arXiv:2405.19107), m2po (the ratio to the rollout, without outliers, arXiv:2510.01161), gpg (no ratio, arXiv:2504.02546), importance_sampling (the plain ratio), cross_entropy (likelihood, without advantages), or your own as "package.module:function"."""

    loss_reduction: Literal[
        "token_mean",
        "token_mean_legacy",
        "sequence_mean",
        "seq_mean_token_sum",
        "seq_mean_token_sum_norm",
        "seq_mean_token_mean",
        "token_sum",
        "prompt_mean",
    ] = setting("token_mean", used_by=RL_OR_SFT)
    """How the loss of the trained tokens of a mini-batch becomes one number; token_mean: mean over tokens, token_mean_legacy: mean over micro-batches of means over their tokens, token_sum: sum, sequence_mean and seq_mean_token_mean: mean over samples of means over their tokens, seq_mean_token_sum: mean over samples of sums, seq_mean_token_sum_norm: the same divided by max_seq_len, prompt_mean: mean over groups of means over their tokens."""

    max_seq_len: int | None = setting(
        None, range=COUNT, used_by=(RL_OR_SFT, _with("loss_reduction", "seq_mean_token_sum_norm"))
    )
    """Divisor of seq_mean_token_sum_norm in tokens; unset: generator.max_input_length + generator.sampling_params.max_generate_length."""

    unbiased_loss_max_tokens: int | None = setting(
        None, range=COUNT, used_by=(RL_OR_SFT, _with("loss_reduction", "seq_mean_token_mean"))
    )
    """Divisor of seq_mean_token_mean in tokens, instead of each sample's own length (Dr.GRPO)."""

    eps_clip_low: float = setting(
        0.2, range=SHARE, used_by=_with("policy_loss_type", "regular", "dual_clip", "gspo", "rollout_is", "clip_cov")
    )
    """Probability ratios below 1 - eps_clip_low are clipped; 1: none."""

    eps_clip_high: float = setting(
        0.2,
        range=NOT_NEGATIVE,
        used_by=_with("policy_loss_type", "regular", "dual_clip", "gspo", "rollout_is", "clip_cov"),
    )
    """Probability ratios above 1 + eps_clip_high are clipped."""

    clip_ratio_c: float = setting(3.0, range=Range(1, low_open=True), used_by=_with("policy_loss_type", "dual_clip"))
    """dual_clip: the loss of a token of negative advantage A is at most clip_ratio_c * |A| (arXiv:1912.09729)."""

    aipo_rho: float = setting(2.0, range=POSITIVE, used_by=_with("policy_loss_type", "aipo"))
    """aipo: upper bound of the probability ratio, the only one of this loss."""

    positive_nll_coef: float | None = setting(None, range=NOT_NEGATIVE)
    """Weight of the negative log-likelihood, as a mean over tokens, of samples with positive reward, which is added to the loss (VAPO, arXiv:2504.05118); unset: none."""

    observation_nll_coef: float | None = setting(None, range=NOT_NEGATIVE)
    """Weight of the negative log-likelihood, as a mean over tokens, of what the environment answers between turns, which is added to the loss (ECHO, arXiv:2605.24517, whose authors use 0.05); unset: none."""

    use_rollout_logprobs_for_loss: bool = False
    """Use the rollout's log-probabilities as the old policy's; saves a forward pass."""

    approximate_old_logprobs: bool = False
    """Estimate the old policy's log-probabilities, between those of rollout and policy by the age of the version that chose the token (A-3PO, arXiv:2512.06547), where a forward pass would compute them: where a batch makes several optimizer steps."""

    use_kl_loss: bool = True
    """Add the KL divergence from the reference model to the loss; excludes use_kl_in_reward, and costs a second model as that does."""

    use_kl_in_reward: bool = False
    """Subtract the KL divergence from the reference model from the reward of each token; excludes use_kl_loss."""

    kl_loss_coef: float = setting(0.001, range=NOT_NEGATIVE, used_by=_REFERENCE)
    """Weight of the KL divergence, in the loss, where tokens are reduced as loss_reduction says, or in the reward."""

    kl_estimator_type: Literal["k1", "k2", "k3", "abs"] = setting("k3", used_by=_REFERENCE)
    """Estimate of the KL divergence per token, with d = policy - reference log-probability; k1: d, abs: |d|, k2: d^2 / 2, k3: exp(-d) - 1 + d."""

    kl_importance_weighted: bool = setting(
        False, used_by=when(".use_kl_loss", needs="{section}.use_kl_loss, because only the loss has a gradient")
    )
    """Multiply the estimate in the loss by the ratio of new to old probability, which makes its gradient unbiased."""

    kl_ctrl: KLControllerConfig = section(KLControllerConfig)

    reference_reset_interval: int | None = setting(None, range=COUNT)
    """Steps between resets of the reference to the current policy; unset: never."""

    reset_optimizer_with_reference: bool = setting(True, used_by=when(".reference_reset_interval"))
    """Start with a fresh optimizer state after such a reset."""

    use_entropy_loss: bool = False
    """Subtract the policy's entropy, weighted, from the loss; it is reported either way."""

    entropy_loss_coef: float = setting(0.01, range=FINITE, used_by=when(".use_entropy_loss", True))
    """Weight of the entropy in nats with use_entropy_loss; tokens are reduced as loss_reduction says."""

    temperature: float | None = setting(None, range=POSITIVE)
    """Divides the logits in training; unset: generator.sampling_params.temperature."""

    logprob_dtype: LogprobDtype = "fp32"
    """Number type in which logits become log-probabilities, of policy, old policy and reference; bf16 and fp16 take half the memory and leave 2 or 3 digits."""

    value_head_prefix: str = setting("value_head", used_by=CRITIC, on_change=OTHER_MODEL)
    """Name of the critic's output layer. A parameter `<name>.weight` of trainer.critic.model.path is loaded; without one, weights are drawn with trainer.seed, so small that values begin near 0."""

    value_clip: float = setting(0.2, range=NOT_NEGATIVE, used_by=CRITIC)
    """A value may move by this much from that before the update, further changes count nothing; 0: no bound, as SkyRL's null."""

    zero_variance_filter: bool = False
    """Leave groups of several samples whose rewards are all equal out of the loss, which then does not count them either."""

    filter_reward_metric: list[str] = setting(
        [], used_by=any_of(when(".dynamic_sampling.type"), when(".zero_variance_filter"))
    )
    """Named rewards, or metrics of the environment, whose sum decides for dynamic_sampling and zero_variance_filter whether a group's rewards are all equal; empty: the reward itself."""

    min_filter_prefix_tokens: int | None = setting(None, range=COUNT)
    """Leave the longest beginnings that several responses of a group share, and that were rewarded differently, out of the loss where they have at least this many tokens; unset: never."""

    off_policy_correction: OffPolicyCorrectionConfig = section(OffPolicyCorrectionConfig)

    dynamic_sampling: DynamicSamplingConfig = section(DynamicSamplingConfig)

    sapo: SAPOConfig = section(SAPOConfig, used_by=_with("policy_loss_type", "sapo"))

    clip_cov: ClipCovConfig = section(ClipCovConfig, used_by=_with("policy_loss_type", "clip_cov"))

    kl_cov: KLCovConfig = section(KLCovConfig, used_by=_with("policy_loss_type", "kl_cov"))

    cispo: CISPOConfig = section(CISPOConfig, used_by=_with("policy_loss_type", "cispo"))

    dppo: DPPOConfig = section(DPPOConfig, used_by=_with("policy_loss_type", "dppo"))

    gmpo: GMPOConfig = section(GMPOConfig, used_by=_with("policy_loss_type", "gmpo"))

    vespo: VESPOConfig = section(VESPOConfig, used_by=_with("policy_loss_type", "vespo"))

    dro: DROConfig = section(DROConfig, used_by=_with("policy_loss_type", "dro"))

    m2po: M2POConfig = section(M2POConfig, used_by=_with("policy_loss_type", "m2po"))

    gdpo: GDPOConfig = section(GDPOConfig, used_by=_with("advantage_estimator", "gdpo"))
