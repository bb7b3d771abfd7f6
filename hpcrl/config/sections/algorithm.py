"""Section `trainer.algorithm`: advantages, losses, corrections, filters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hpcrl.config.conditions import CRITIC, RL_OR_SFT, chosen
from hpcrl.config.effects import OTHER_MODEL
from hpcrl.config.sections.functions import (
    ADVANTAGE_ESTIMATORS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    FunctionsConfig,
    KlEstimator,
)
from hpcrl.config.setting import (
    COUNT,
    FINITE,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    SHARE_ABOVE_0,
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
    """Leave out tokens whose binary KL divergence between old policy and rollout is above this in either direction, in nats (KPop, whose authors use 0.1). Binary is this token against all others. Unset: none."""

    negative_sample_mask_delta: float | None = None
    """Leave out samples of negative advantage whose log-probability fell by more than this, in nats per token on average, since the old policy (DeepSeek-V3.2); with tis_ratio_type, since the rollout. Unset: none."""


@dataclass(frozen=True, kw_only=True)
class DynamicSamplingConfig:
    type: Literal["filter", "replace"] | None = None
    """What happens to groups of several samples whose rewards are all equal; filter: another prompt is generated instead (DAPO, arXiv:2503.14476), replace: other groups of the batch take their places (POLARIS). Unset: they are trained. trainer.epochs sets the number of steps as without it."""

    max_sample_batches: int = setting(30, used_by=when(".type"))
    """How many times a batch of groups may be generated for one step; the run fails if these do not yield one batch. 0 or less: no bound."""

    min_replace_ratio: float = setting(0.3, range=SHARE_BELOW_1, used_by=when(".type", "replace"))
    """replace: share of groups with different rewards that a batch must exceed to be used; otherwise it is generated again."""


@dataclass(frozen=True, kw_only=True)
class GDPOConfig:
    rewards: dict[str, float] = setting({})
    """gdpo: named rewards, or metrics of the environment, with their weights, such as {correct = 1.0, format = 0.3}; `reward` is that of the sample itself. An advantage estimator of your own finds them in `named_B`."""


def _read_by(name: str) -> When:
    return chosen("policy_loss_type", *(loss for loss, one in POLICY_LOSSES.items() if name in one.settings))


_DISCOUNTS = any_of(
    chosen("advantage_estimator", "gae", "reinforce++", "gigpo", "turn_returns"),
    CRITIC,
    needs="{section}.advantage_estimator=gae, reinforce++, gigpo or turn_returns, or a critic",
)
_REFERENCE = when("trainer.uses_reference", needs="{section}.use_kl_loss or use_kl_in_reward")


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig(FunctionsConfig):
    advantage_estimator: str = setting("grpo", named=ADVANTAGE_ESTIMATORS)
    """How rewards become advantages. {names}; or your own as "package.module:function"."""

    grpo_norm_by_std: bool = setting(
        True, used_by=chosen("advantage_estimator", "grpo", "pass_at_k", "turn_grpo", "gigpo")
    )
    """grpo, pass_at_k, turn_grpo, gigpo: divide a group's advantages by the standard deviation of its rewards (false: Dr.GRPO, arXiv:2503.20783)."""

    advantage_batch_normalize: bool = False
    """Standardize advantages over all trained tokens of the batch."""

    advantage_clip_low: float | None = None
    """Advantages below this are raised to it; unset: none."""

    advantage_clip_high: float | None = None
    """Advantages above this are lowered to it; unset: none."""

    gamma: float = setting(1.0, range=SHARE, used_by=_DISCOUNTS)
    """gae, reinforce++ and what a critic learns: discount of a reward per trained token that it comes later. gigpo: per turn."""

    lambd: float = setting(1.0, range=SHARE, used_by=CRITIC)
    """gae, and what a critic learns: lambda; 1: advantages from all later rewards, 0: from the next value alone."""

    critic_lambd: float | None = setting(None, range=SHARE, used_by=CRITIC)
    """Lambda of the returns that a critic learns, where it is not that of the advantages (decoupled GAE, VAPO, arXiv:2504.05118, whose authors use 1.0: unbiased returns); unset: lambd."""

    policy_loss_type: str = setting("regular", named=POLICY_LOSSES)
    """Policy loss. {names}; or your own as "package.module:function"."""

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
    """How the losses of a mini-batch's trained tokens become one number. token_mean: mean over tokens; token_sum: sum over tokens. token_mean_legacy: mean over micro-batches of means over their tokens. sequence_mean and seq_mean_token_mean: mean over samples of means over their tokens. seq_mean_token_sum: mean over samples of sums; seq_mean_token_sum_norm: the same divided by max_seq_len. prompt_mean: mean over groups of means over their tokens."""

    max_seq_len: int | None = setting(
        None, range=COUNT, used_by=(RL_OR_SFT, chosen("loss_reduction", "seq_mean_token_sum_norm"))
    )
    """Divisor of seq_mean_token_sum_norm in tokens; unset: generator.max_input_length + generator.sampling_params.max_generate_length."""

    unbiased_loss_max_tokens: int | None = setting(
        None, range=COUNT, used_by=(RL_OR_SFT, chosen("loss_reduction", "seq_mean_token_mean"))
    )
    """Divisor of seq_mean_token_mean in tokens, instead of each sample's own length (Dr.GRPO)."""

    eps_clip_low: float = setting(0.2, range=SHARE, used_by=_read_by("eps_clip_low"))
    """Probability ratios below 1 - eps_clip_low are clipped; 1: none."""

    eps_clip_high: float = setting(0.2, range=NOT_NEGATIVE, used_by=_read_by("eps_clip_high"))
    """Probability ratios above 1 + eps_clip_high are clipped."""

    clip_ratio_c: float = setting(3.0, range=Range(1, low_open=True), used_by=_read_by("clip_ratio_c"))
    """dual_clip: the loss of a token of negative advantage A is at most clip_ratio_c * |A| (arXiv:1912.09729)."""

    aipo_rho: float = setting(2.0, range=POSITIVE, used_by=_read_by("aipo_rho"))
    """aipo: upper bound of the probability ratio, the only one of this loss."""

    positive_nll_coef: float | None = setting(None, range=NOT_NEGATIVE)
    """Weight of the negative log-likelihood, as a mean over tokens, of samples with positive reward, which is added to the loss (VAPO, arXiv:2504.05118); unset: none."""

    observation_nll_coef: float | None = setting(None, range=NOT_NEGATIVE)
    """Weight of the negative log-likelihood of the environment's answers between turns, as a mean over tokens, in the loss (ECHO, arXiv:2605.24517, whose authors use 0.05); unset: none."""

    top_entropy_quantile: float = setting(1.0, range=SHARE_ABOVE_0)
    """Share of a mini-batch's trained tokens, those of highest entropy before the update, that the policy loss counts (arXiv:2506.01939, whose authors use 0.2). All others count 0 in its means, and have the KL and entropy terms alone. It costs a forward pass. 1: all."""

    use_rollout_logprobs_for_loss: bool = False
    """Use the rollout's log-probabilities as the old policy's; saves a forward pass."""

    approximate_old_logprobs: bool = False
    """Estimate the old policy's log-probabilities instead of computing them in a forward pass, where a batch makes several optimizer steps. They are interpolated between those of rollout and policy by the age of the version that chose the token (A-3PO, arXiv:2512.06547)."""

    use_kl_loss: bool = True
    """Add the KL divergence from the reference model to the loss; excludes use_kl_in_reward, and costs a second model as that does."""

    use_kl_in_reward: bool = False
    """Subtract the KL divergence from the reference model from the reward of each token; excludes use_kl_loss."""

    kl_loss_coef: float = setting(0.001, range=NOT_NEGATIVE, used_by=_REFERENCE)
    """Weight of the KL divergence, in the loss, where tokens are reduced as loss_reduction says, or in the reward."""

    kl_estimator_type: KlEstimator = setting("k3", used_by=_REFERENCE, named=KL_ESTIMATORS)
    """Estimate of the KL divergence per token, with d = policy - reference log-probability. {names}."""

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

    zero_variance_filter_tol: float = setting(1e-6, range=NOT_NEGATIVE, used_by=when(".zero_variance_filter", True))
    """Rewards of a group count as equal where the highest exceeds the lowest by at most this."""

    filter_reward_metric: list[str] = setting(
        [], used_by=any_of(when(".dynamic_sampling.type"), when(".zero_variance_filter"))
    )
    """Named rewards, or metrics of the environment, whose sum decides for dynamic_sampling and zero_variance_filter whether a group's rewards are all equal; empty: the reward itself."""

    min_filter_prefix_tokens: int | None = setting(None, range=COUNT)
    """Leave the longest beginnings that several responses of a group share, and that were rewarded differently, out of the loss where they have at least this many tokens; unset: never."""

    off_policy_correction: OffPolicyCorrectionConfig = section(OffPolicyCorrectionConfig)

    dynamic_sampling: DynamicSamplingConfig = section(DynamicSamplingConfig)

    gdpo: GDPOConfig = section(GDPOConfig, used_by=chosen("advantage_estimator", "gdpo"))

    @property
    def resets_optimizer(self) -> bool:
        """Whether the optimizer starts afresh with the reference; one that follows each epoch leaves it alone, as SkyRL's."""
        return self.reference_reset_interval is not None and self.reset_optimizer_with_reference

    @property
    def needs_baselines(self) -> bool:
        """Whether each training group needs the reward of a greedy response."""
        return self.advantage_estimator == "remax"

    @property
    def needs_norms(self) -> bool:
        """Whether scoring measures the gradient of each token's log-probability over the logits."""
        return self.advantage_estimator == "optimal_token_baseline"
