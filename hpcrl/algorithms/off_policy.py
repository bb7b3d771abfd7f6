"""Corrections for samples that another policy drew than the one that the update began with: weights and masks before any loss.

w = pi_old / pi_rollout per token, its logarithm clamped to [-20, 20]: what differs is the engine's arithmetic and the versions that
have passed since. Each part works on what the parts before it have left: outlier samples, tokens out of bounds, samples out of
bounds; then weights. Tokens that are left out still count in the means over tokens and samples, so that a loss remains a sum of weighted
tokens. Cosmos-RL does the same; SkyRL and verl divide by the remaining ones. KL and entropy terms are not corrected.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hpcrl.algorithms.losses import (
    LossTokens,
    binary_kl,
    bounded_exp,
    masked_sum,
    ratio,
    sample_means,
    sample_sums,
    spread,
)
from hpcrl.config.sections.algorithm import OffPolicyCorrectionConfig

PER_SAMPLE = frozenset(
    {
        "outlier_seq_masked_ratio", "outlier_seq_over_high_ratio", "outlier_seq_under_low_ratio", "tis_seq_clip_high_ratio",
        "geo_sequence_mask_masked_ratio", "geo_sequence_mask_over_high_ratio", "geo_sequence_mask_under_low_ratio",
        "product_sequence_mask_masked_ratio", "product_sequence_mask_over_high_ratio",
        "product_sequence_mask_under_low_ratio", "negative_sample_masked_ratio",
    }
)  # fmt: skip
"""Metrics that count samples; all others count tokens. Samples without a trained token do not count."""


@dataclass(frozen=True)
class Correction:
    """What becomes of the tokens of a micro-batch; no gradient flows through it.

    Attributes:
        mask: [P], the loss mask without the tokens that are left out.
        weights: [P] that multiply the loss; None where only the mask says something.
        sums: of metrics, by name; see PER_SAMPLE. Names that end in _max or _min are extremes instead.
    """

    mask: torch.Tensor
    weights: torch.Tensor | None
    sums: dict[str, torch.Tensor]

    def of(self, loss_P: torch.Tensor) -> torch.Tensor:
        """Return the corrected loss: 0 where a token is left out."""
        weighted_P = loss_P if self.weights is None else loss_P * self.weights
        return torch.where(self.mask > 0, weighted_P, 0.0)


def proximal_logprobs(
    logprobs_P: torch.Tensor, rollout_logprobs_P: torch.Tensor, staleness_P: torch.Tensor
) -> torch.Tensor:
    """Return an estimate of the old policy's log-probabilities, [P], without a pass of its own (A-3PO, arXiv:2512.06547).

    log pi_rollout + d / (d + 1) (log pi - log pi_rollout). The policy is assumed to move by the same in each step. The update is one more
    of the d steps between the version that sampled the token and the version at the step's beginning.

    Args:
        logprobs_P: of the policy that is updated, without gradient.
        staleness_P: d, at least 0.
    """
    share_P = staleness_P / (staleness_P + 1)
    return rollout_logprobs_P + share_P * (logprobs_P - rollout_logprobs_P)


def is_enabled(settings: OffPolicyCorrectionConfig) -> bool:
    """Return whether any correction is switched on."""
    names = ("tis_ratio_type", "sequence_mask_metric", "negative_sample_mask_delta", *_THRESHOLDS)
    return any(getattr(settings, name) is not None for name in names)


_THRESHOLDS = (
    "outlier_token_is_threshold_low",
    "outlier_token_is_threshold_high",
    "token_mask_is_threshold_low",
    "token_mask_is_threshold_high",
    "token_mask_kl_threshold",
)


@torch.no_grad()
def correct(tokens: LossTokens, settings: OffPolicyCorrectionConfig) -> Correction:
    """Return weights and mask of the tokens of a micro-batch, each sample by itself."""
    ratio_P, sums = ratio(tokens.old_logprobs, tokens.rollout_logprobs), {}
    _describe(ratio_P, tokens.mask, sums)
    mask_P = _without_outliers(ratio_P, tokens, tokens.mask, settings, sums)
    mask_P = _without_tokens(ratio_P, mask_P, settings, sums)
    mask_P = _without_divergent_tokens(tokens, mask_P, settings, sums)
    weights_P = _truncated_weights(ratio_P, tokens, mask_P, settings, sums)
    mask_P = _without_samples(tokens, mask_P, settings, sums)
    mask_P = _without_negative_samples(tokens, mask_P, settings, sums)
    return Correction(mask_P, weights_P, sums)


def _describe(ratio_P: torch.Tensor, mask_P: torch.Tensor, sums: dict[str, torch.Tensor]) -> None:
    sums["is_ratio_mean"] = masked_sum(ratio_P, mask_P)
    sums["is_ratio_squared"] = masked_sum(ratio_P.square(), mask_P)
    sums["is_ratio_max"] = torch.where(mask_P > 0, ratio_P, 0.0).max()
    sums["is_ratio_min"] = torch.where(mask_P > 0, ratio_P, torch.inf).min()


def _without_outliers(
    ratio_P: torch.Tensor,
    tokens: LossTokens,
    mask_P: torch.Tensor,
    settings: OffPolicyCorrectionConfig,
    sums: dict[str, torch.Tensor],
) -> torch.Tensor:
    """Leave out samples with a single token whose ratio is out of bounds; the bounds are in."""
    low, high = settings.outlier_token_is_threshold_low, settings.outlier_token_is_threshold_high
    if low is None and high is None:
        return mask_P
    over_B = sample_sums((ratio_P > (torch.inf if high is None else high)).float(), mask_P, tokens.lengths) > 0
    under_B = sample_sums((ratio_P < (0.0 if low is None else low)).float(), mask_P, tokens.lengths) > 0
    return _leave_out(mask_P, tokens, over_B, under_B, "outlier_seq", sums)


def _without_tokens(
    ratio_P: torch.Tensor, mask_P: torch.Tensor, settings: OffPolicyCorrectionConfig, sums: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Leave out tokens whose ratio is out of bounds; the bounds are in."""
    low, high = settings.token_mask_is_threshold_low, settings.token_mask_is_threshold_high
    if low is None or high is None:
        return mask_P
    out_P = (ratio_P < low) | (ratio_P > high)
    sums["token_mask_ratio"] = masked_sum(out_P.float(), mask_P)
    return mask_P.masked_fill(out_P, 0.0)


def _without_divergent_tokens(
    tokens: LossTokens, mask_P: torch.Tensor, settings: OffPolicyCorrectionConfig, sums: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Leave out tokens with a binary KL divergence between old policy and rollout, in one direction or the other, above the bound.

    KPop (https://ringtech.notion.site/kpop). Unlike bounds on the ratio, it lets rare tokens differ by more than frequent ones.
    """
    if (bound := settings.token_mask_kl_threshold) is None:
        return mask_P
    old_P, rollout_P = tokens.old_logprobs, tokens.rollout_logprobs
    out_P = torch.maximum(binary_kl(old_P, rollout_P), binary_kl(rollout_P, old_P)) > bound
    sums["token_mask_kl_ratio"] = masked_sum(out_P.float(), mask_P)
    return mask_P.masked_fill(out_P, 0.0)


def _truncated_weights(
    ratio_P: torch.Tensor,
    tokens: LossTokens,
    mask_P: torch.Tensor,
    settings: OffPolicyCorrectionConfig,
    sums: dict[str, torch.Tensor],
) -> torch.Tensor | None:
    """Truncated importance sampling: w, or its product over the sample, at most a cap (IMPALA, arXiv:1802.01561, section 4.1).

    With token_tis_ratio_drop_high there is no cap: tokens above it weigh 0 (the behaviour weights of arXiv:2505.24298).
    """
    if settings.tis_ratio_type is None:
        return None
    if settings.tis_ratio_type == "sequence":
        cap = settings.sequence_tis_ratio_clip_high
        product_B = bounded_exp(sample_sums(tokens.old_logprobs - tokens.rollout_logprobs, mask_P, tokens.lengths))
        sums["tis_seq_clip_high_ratio"] = ((product_B > cap) & _trained(tokens)).sum()
        return spread(product_B.clamp(max=cap), tokens.lengths, len(mask_P))
    if (bound := settings.token_tis_ratio_drop_high) is not None:
        sums["tis_token_drop_high_ratio"] = masked_sum((ratio_P > bound).float(), mask_P)
        return torch.where(ratio_P > bound, 0.0, ratio_P)
    cap = settings.token_tis_ratio_clip_high
    sums["tis_token_clip_high_ratio"] = masked_sum((ratio_P > cap).float(), mask_P)
    return ratio_P.clamp(max=cap)


def _without_samples(
    tokens: LossTokens, mask_P: torch.Tensor, settings: OffPolicyCorrectionConfig, sums: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Leave out samples whose ratio, as a product over tokens or a geometric mean, is out of bounds; the bounds are in."""
    difference_P = tokens.old_logprobs - tokens.rollout_logprobs
    if settings.sequence_mask_metric == "geometric":
        value_B = bounded_exp(sample_means(difference_P, mask_P, tokens.lengths))
        low, high, name = settings.geo_mask_low, settings.geo_mask_high, "geo_sequence_mask"
    elif settings.sequence_mask_metric == "product":
        value_B = bounded_exp(sample_sums(difference_P, mask_P, tokens.lengths))
        low, high, name = settings.product_mask_low, settings.product_mask_high, "product_sequence_mask"
    else:
        return mask_P
    return _leave_out(mask_P, tokens, value_B > high, value_B < low, name, sums)


def _without_negative_samples(
    tokens: LossTokens, mask_P: torch.Tensor, settings: OffPolicyCorrectionConfig, sums: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Leave out samples of negative advantage that the policy has moved away from (DeepSeek-V3.2, arXiv:2512.02556).

    That is where the mean over tokens of log pi_before - log pi is above the bound. Before is the rollout where importance weights correct
    from there to the old policy, else the old policy.
    """
    if (bound := settings.negative_sample_mask_delta) is None:
        return mask_P
    before_P = tokens.old_logprobs if settings.tis_ratio_type is None else tokens.rollout_logprobs
    fallen_B = sample_means(before_P - tokens.logprobs, tokens.mask, tokens.lengths) > bound
    out_B = fallen_B & (sample_sums(tokens.advantages, tokens.mask, tokens.lengths) < 0)
    sums["negative_sample_masked_ratio"] = out_B.sum()
    return mask_P.masked_fill(spread(out_B, tokens.lengths, len(mask_P)), 0.0)


def _leave_out(
    mask_P: torch.Tensor,
    tokens: LossTokens,
    over_B: torch.Tensor,
    under_B: torch.Tensor,
    name: str,
    sums: dict[str, torch.Tensor],
) -> torch.Tensor:
    trained_B = _trained(tokens)
    for suffix, hit_B in (("masked", over_B | under_B), ("over_high", over_B), ("under_low", under_B)):
        sums[f"{name}_{suffix}_ratio"] = (hit_B & trained_B).sum()
    return mask_P.masked_fill(spread(over_B | under_B, tokens.lengths, len(mask_P)), 0.0)


def _trained(tokens: LossTokens) -> torch.Tensor:
    return sample_sums(tokens.mask, tokens.mask, tokens.lengths) > 0
