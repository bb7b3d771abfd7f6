"""Names of losses, estimators and rewards, and the sections of those that have settings of their own.

Made from hpcrl/algorithms and hpcrl/envs/rewards by `python -m hpcrl.docs.describe`; do not edit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hpcrl.config.conditions import chosen
from hpcrl.config.setting import NOT_NEGATIVE, POSITIVE, SEVERAL, SHARE, Named, section, setting

# fmt: off

POLICY_LOSSES: dict[str, Named] = {
    "regular": Named("the clipped surrogate of PPO (arXiv:1707.06347), with two bounds as in DAPO (arXiv:2503.14476)", ("eps_clip_low", "eps_clip_high",)),
    "dual_clip": Named("the clipped surrogate, also bounded for negative advantages (arXiv:1912.09729)", ("eps_clip_low", "eps_clip_high", "clip_ratio_c",)),
    "gspo": Named("the clipped surrogate with one ratio per sample (GSPO, arXiv:2507.18071)", ("eps_clip_low", "eps_clip_high",)),
    "turn_gspo": Named("the clipped surrogate with one ratio per turn (chunks of interaction, arXiv:2512.24873)", ("eps_clip_low", "eps_clip_high",)),
    "sapo": Named("the loss with a soft gate (SAPO, arXiv:2511.20347)", ("tau_pos", "tau_neg",)),
    "cispo": Named("the loss with clipped weights (CISPO, arXiv:2506.13585)", ("cispo_eps_clip_low", "cispo_eps_clip_high",)),
    "rollout_is": Named("the loss weighted by the ratio to the rollout, 0 out of bounds (IcePop, https://ringtech.notion.site/icepop)", ("eps_clip_low", "eps_clip_high",)),
    "clip_cov": Named("the clipped surrogate without some tokens of high covariance (Clip-Cov, arXiv:2505.22617)", ("eps_clip_low", "eps_clip_high", "clip_ratio", "clip_cov_lb", "clip_cov_ub",)),
    "kl_cov": Named("the loss with a divergence for tokens of high covariance (KL-Cov, arXiv:2505.22617)", ("kl_cov_frac", "ppo_kl_coef",)),
    "cross_entropy": Named("the negative log-likelihood of the tokens, without advantages", ()),
    "importance_sampling": Named("the surrogate of TRPO, the plain ratio (arXiv:1502.05477)", ()),
    "aipo": Named("the loss with a ratio bounded on one side, for any sign of the advantage (AIPO, arXiv:2505.24034)", ("aipo_rho",)),
    "dppo": Named("the loss of the tokens inside a trust region of divergence from the rollout (DPPO, arXiv:2602.04879)", ("dppo_type", "delta_low", "delta_high", "two_sided", "kl_tau",)),
    "gpg": Named("the gradient of the policy without a ratio (GPG, arXiv:2504.02546)", ()),
    "gmpo": Named("the loss with the geometric mean of a sample's clipped ratios (GMPO, arXiv:2507.20673)", ("log_clip_low", "log_clip_high",)),
    "vespo": Named("the loss weighted smoothly by the ratio of whole samples (VESPO, arXiv:2602.10693)", ("k_pos", "lambda_pos", "k_neg", "lambda_neg",)),
    "dro": Named("the policy gradient with a squared penalty in place of a ratio (DRO, arXiv:2405.19107 and arXiv:2501.12599)", ("beta",)),
    "m2po": Named("the ratio to the rollout without the tokens that have gone farthest from it (M2PO, arXiv:2510.01161)", ("threshold",)),
    "ipa": Named("the gradient of the policy, weighted where it pushes down by the turn's ratio to the rollout (after IPA, arXiv:2512.24873)", ("ratio_high",)),
}

ADVANTAGE_ESTIMATORS: dict[str, Named] = {
    "grpo": Named("the reward against the mean of its group (GRPO, arXiv:2402.03300)", ("grpo_norm_by_std",)),
    "pass_at_k": Named("what a sample adds to the best of k samples of its group (PKPO, arXiv:2505.15201)", ("grpo_norm_by_std", "k",)),
    "rloo": Named("the reward against the mean of the group's other samples (RLOO, arXiv:2402.14740)", ()),
    "maxrl": Named("the reward against the mean of its group, divided by that mean (MaxRL, arXiv:2602.02710)", ()),
    "online_dpo": Named("the weights of the best and of the worst sample of each group in the gradient of DPO (online DPO, arXiv:2402.04792)", ("kl_loss_coef",)),
    "opo": Named("the reward against the mean of its group, weighted by trained tokens (OPO, arXiv:2505.23585)", ()),
    "optimal_token_baseline": Named("the rewards from each token on against the optimal baseline of its position in the group (optimal token baseline, arXiv:2602.07078)", ()),
    "remax": Named("the reward against that of the greedy response to the same prompt (ReMax, arXiv:2310.10505)", ()),
    "gdpo": Named("several rewards, each against the mean of its group by itself (GDPO, arXiv:2601.05242)", ("rewards",)),
    "turn_grpo": Named("the rewards from each turn on, each against the mean over all turns of its group (GRPO with process supervision, arXiv:2402.03300)", ("grpo_norm_by_std",)),
    "gigpo": Named("the sample against its group, and each turn against those that the group took in the same state (GiGPO, arXiv:2505.10978)", ("gamma", "grpo_norm_by_std", "step_weight", "episode_weight",)),
    "turn_returns": Named("the rewards from each turn on, discounted by turns, without a baseline (chunk-level returns of IPA, arXiv:2512.24873)", ("gamma",)),
    "rae": Named("the reward against a moving mean of those of its data source and role (role-conditioned advantages of SPIRAL, arXiv:2506.24119)", ("decay",)),
    "reinforce++": Named("the discounted rewards from each token on, whitened over the batch (REINFORCE++, arXiv:2501.03262)", ("gamma",)),
    "reinforce++_baseline": Named("the reward against the mean of its group, whitened over the tokens of the batch (REINFORCE++ with a baseline, arXiv:2501.03262)", ()),
    "gae": Named("generalized advantages against a critic, whitened over the batch (GAE, arXiv:1506.02438)", ("gamma", "lambd", "length_alpha",)),
}

KL_ESTIMATORS: dict[str, Named] = {
    "k1": Named("d, unbiased and of either sign", ()),
    "k2": Named("d^2 / 2, never negative", ()),
    "k3": Named("exp(-d) - 1 + d, never negative and with little variance", ()),
    "abs": Named("|d|", ()),
}

REWARDS: dict[str, Named] = {
    "single_choice": Named("1 if the answer in <answer> tags is the ground truth, but for letter case and surrounding white space, else 0", ()),
    "boxed_math": Named("1 if the answer is mathematically the ground truth, else 0", ()),
    "gsm8k": Named("1 if the number after the first `####` behind </think> is the ground truth, else 0 (GSM8K, arXiv:2110.14168)", ()),
    "direct_math": Named("1 if the ground truth is what follows the last `Answer:`, else -1 (DAPO, arXiv:2503.14476)", ()),
    "by_data_source": Named("the reward that belongs to the row's `data_source`, as verl's default_compute_score chooses its score", ()),
    "format": Named("1 if the text is one thought, an empty line and one answer, each in its tags, and nothing else, else 0", ()),
    "overlong": Named("a penalty on a response that ends in the last `buffer_length` tokens, from 0 down to -penalty_factor", ()),
    "rubric_judge": Named("the grade of a response by a judge model, from 0 to 1", ()),
    "redness": Named("how much redder a picture is than it is green and blue, from -1 to 1", ()),
    "brightness": Named("the mean luma of a picture, from 0 to 1", ()),
    "symmetry": Named("how alike a picture and its mirror image are, left and right exchanged, from 0 to 1", ()),
}

GROUP_REWARDS: dict[str, Named] = {
    "own": Named("the reward that each sample has by itself, from its environment or named rewards", ()),
    "rank": Named("the rank of each sample's own reward in its group, from -1 for the lowest to 1 for the highest; equal rewards share one", ()),
    "best": Named("1 for each sample whose own reward no other one of the group exceeds, else 0", ()),
    "unique": Named("each sample's own reward, where it is positive divided by the number of samples with the same answer", ()),
    "distinct": Named("the share of each answer's different three-word sequences that no other answer of the group has, from 0 to 1", ()),
    "short": Named("what each sample's tokens are worth beside the others' (Kimi k1.5, arXiv:2501.12599)", ()),
    "pairwise_judge": Named("the share of comparisons with others of its group that each sample wins by a judge model, a draw counting half", ()),
    "rubric_judge": Named("the grade of each sample's whole conversation by a judge model, from 0 to 1", ()),
}

KlEstimator = Literal["k1", "k2", "k3", "abs",]

COMPARING_REWARDS = ("single_choice", "boxed_math", "gsm8k", "direct_math",)

IMAGE_REWARDS = ("redness", "brightness", "symmetry",)


@dataclass(frozen=True, kw_only=True)
class SapoConfig:
    tau_pos: float = setting(1.0, range=POSITIVE)
    """sapo: steepness of the gate around ratio 1 for positive advantages (arXiv:2511.20347)."""

    tau_neg: float = setting(1.05, range=POSITIVE)
    """sapo: the same for other advantages; above tau_pos: they are damped sooner."""


@dataclass(frozen=True, kw_only=True)
class CispoConfig:
    cispo_eps_clip_low: float = setting(0.0, range=SHARE)
    """cispo: probability ratios below 1 - cispo_eps_clip_low are raised to that bound (arXiv:2506.13585)."""

    cispo_eps_clip_high: float = setting(5.0, range=NOT_NEGATIVE)
    """cispo: probability ratios above 1 + cispo_eps_clip_high are lowered to that bound."""


@dataclass(frozen=True, kw_only=True)
class ClipCovConfig:
    clip_ratio: float = setting(0.0002, range=SHARE)
    """clip_cov: share of the tokens of a micro-batch that is left out, drawn at random, at least one token (arXiv:2505.22617)."""

    clip_cov_lb: float = 1.0
    """clip_cov: tokens may be left out whose covariance of advantage and log-probability is above this."""

    clip_cov_ub: float = 5.0
    """clip_cov: and below this."""


@dataclass(frozen=True, kw_only=True)
class KlCovConfig:
    kl_cov_frac: float = setting(0.2, range=SHARE)
    """kl_cov: share of the tokens of a micro-batch, those of largest covariance of advantage and log-probability, that get a KL term (arXiv:2505.22617)."""

    ppo_kl_coef: float = setting(1.0, range=NOT_NEGATIVE)
    """kl_cov: weight of that term, |new - old log-probability|."""


@dataclass(frozen=True, kw_only=True)
class DppoConfig:
    dppo_type: Literal["binary_tv", "binary_kl"] = "binary_tv"
    """dppo: divergence of the policy from the rollout, of this token against all others; binary_tv: difference of the probabilities, binary_kl: KL(rollout || policy) in nats (arXiv:2602.04879)."""

    delta_low: float = setting(0.2, range=NOT_NEGATIVE)
    """dppo: tokens of negative advantage count nothing once the policy has fallen from the rollout by a divergence above this; 0.05 is usual with binary_kl."""

    delta_high: float = setting(0.2, range=NOT_NEGATIVE)
    """dppo: the same for tokens of positive advantage and a policy that has risen."""

    two_sided: bool = False
    """dppo: the deltas bound tokens of any advantage, also those on the way back to the rollout (prime-rl's IPO, with deltas of 0.3)."""

    kl_tau: float = setting(0.0, range=NOT_NEGATIVE)
    """dppo: weight of (log π/π_rollout)², which is added for every token, masked or not (prime-rl's default loss until August 2026, with 0.001)."""


@dataclass(frozen=True, kw_only=True)
class GmpoConfig:
    log_clip_low: float = setting(0.4, range=NOT_NEGATIVE)
    """gmpo: logarithms of probability ratios below -log_clip_low are raised to it, where the advantage is negative (arXiv:2507.20673)."""

    log_clip_high: float = setting(0.4, range=NOT_NEGATIVE)
    """gmpo: those above log_clip_high are lowered to it, where the advantage is positive."""


@dataclass(frozen=True, kw_only=True)
class VespoConfig:
    k_pos: float = setting(2.0, range=NOT_NEGATIVE)
    """vespo: exponent of a sample's probability ratio to the rollout in its weight, for advantages that are not negative (arXiv:2602.10693). With a larger one, samples that have become rare count less."""

    lambda_pos: float = setting(3.0, range=NOT_NEGATIVE)
    """vespo: rate at which the weight falls for these where the ratio is large."""

    k_neg: float = setting(3.0, range=NOT_NEGATIVE)
    """vespo: the exponent for negative advantages."""

    lambda_neg: float = setting(2.0, range=NOT_NEGATIVE)
    """vespo: the rate for negative advantages."""


@dataclass(frozen=True, kw_only=True)
class DroConfig:
    beta: float = setting(1.0, range=NOT_NEGATIVE)
    """dro: weight of the squared logarithm of the probability ratio to the rollout, half of which is added to the loss (arXiv:2405.19107). A token is drawn to the logarithm A / beta, so that beta depends on the size of the advantages, about 1 with grpo."""


@dataclass(frozen=True, kw_only=True)
class M2poConfig:
    threshold: float = setting(0.04, range=POSITIVE)
    """m2po: bound of the mean of the squared logarithms of probability ratios to the rollout, over tokens that move away from it. The largest are left out until the mean is within the bound (arXiv:2510.01161)."""


@dataclass(frozen=True, kw_only=True)
class IpaConfig:
    ratio_high: float = setting(5.0, range=POSITIVE)
    """ipa: turns whose geometric mean of probability ratios to the rollout is above this count nothing (after arXiv:2512.24873, which gives no number)."""


@dataclass(frozen=True, kw_only=True)
class PassAtKConfig:
    k: int = setting(4, range=SEVERAL)
    """pass_at_k: number of samples whose best reward is trained (arXiv:2505.15201); at most generator.n_samples_per_prompt."""


@dataclass(frozen=True, kw_only=True)
class GigpoConfig:
    step_weight: float = setting(1.0, range=NOT_NEGATIVE)
    """gigpo: weight of the part that compares turns in the same state (arXiv:2505.10978, whose authors use 1)."""

    episode_weight: float = setting(1.0, range=NOT_NEGATIVE)
    """gigpo: weight of the part that compares whole samples."""


@dataclass(frozen=True, kw_only=True)
class RaeConfig:
    decay: float = setting(0.95, range=SHARE)
    """rae: what is left of a moving mean after one sample (arXiv:2506.24119, whose authors use 0.95)."""


@dataclass(frozen=True, kw_only=True)
class GaeConfig:
    length_alpha: float = setting(0.0, range=NOT_NEGATIVE)
    """gae: makes the lambda of a sample's advantages 1 - 1 / (length_alpha * its trained tokens), at least 0, instead of lambd (VAPO, arXiv:2504.05118). Its authors use 0.05; 0: lambd for all."""


@dataclass(frozen=True, kw_only=True)
class FunctionsConfig:
    sapo: SapoConfig = section(SapoConfig, used_by=chosen("policy_loss_type", "sapo"))

    cispo: CispoConfig = section(CispoConfig, used_by=chosen("policy_loss_type", "cispo"))

    clip_cov: ClipCovConfig = section(ClipCovConfig, used_by=chosen("policy_loss_type", "clip_cov"))

    kl_cov: KlCovConfig = section(KlCovConfig, used_by=chosen("policy_loss_type", "kl_cov"))

    dppo: DppoConfig = section(DppoConfig, used_by=chosen("policy_loss_type", "dppo"))

    gmpo: GmpoConfig = section(GmpoConfig, used_by=chosen("policy_loss_type", "gmpo"))

    vespo: VespoConfig = section(VespoConfig, used_by=chosen("policy_loss_type", "vespo"))

    dro: DroConfig = section(DroConfig, used_by=chosen("policy_loss_type", "dro"))

    m2po: M2poConfig = section(M2poConfig, used_by=chosen("policy_loss_type", "m2po"))

    ipa: IpaConfig = section(IpaConfig, used_by=chosen("policy_loss_type", "ipa"))

    pass_at_k: PassAtKConfig = section(PassAtKConfig, used_by=chosen("advantage_estimator", "pass_at_k"))

    gigpo: GigpoConfig = section(GigpoConfig, used_by=chosen("advantage_estimator", "gigpo"))

    rae: RaeConfig = section(RaeConfig, used_by=chosen("advantage_estimator", "rae"))

    gae: GaeConfig = section(GaeConfig, used_by=chosen("advantage_estimator", "gae"))
