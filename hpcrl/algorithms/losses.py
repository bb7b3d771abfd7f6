"""Policy losses per token, from log-probabilities.

A loss gives [P] values and the sums of its own metrics over the mask. It neither divides nor knows the mini-batch: the caller multiplies
by the weights of hpcrl/algorithms/reductions.py and adds everything up. So nothing depends on packing, micro-batch size or number of
ranks. The exceptions are clip_cov, kl_cov and m2po, which compare a token with the others of its micro-batch.

A loss's other parameters are its settings (hpcrl/algorithms/settings.py). One with a default is a setting of `trainer.algorithm.<loss>`,
with the type, range and default of the signature, and the meaning under `Args`. One without is a setting of `trainer.algorithm` that
several losses share. `Formula` and `Use` are the loss's row in docs/algorithms.md, where r = pi / pi_old and
A is the advantage. `python -m hpcrl.docs.describe` makes the section and the page from this file. A user's own loss has the
same signature, and is named as "package.module:function".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal

import torch

from hpcrl.config.setting import NotNegative, Positive, Share

_MAX_LOG_RATIO = 20.0
_MAX_LOG_SAMPLE_RATIO = 10.0
_LEAST_PROBABILITY = 1e-8
_LEAST_LOG_WEIGHT = math.log(1e-8)

Values = tuple[torch.Tensor, dict[str, torch.Tensor]]
Loss = Callable[..., Values]
"""(tokens, its settings by keyword) -> loss [P], and sums over the mask of metrics, by name."""


@dataclass(frozen=True)
class LossTokens:
    """What a loss knows of the tokens of a micro-batch: [P] tensors, 16-bit ones widened to float32.

    Attributes:
        logprobs: of the policy; carries the gradient, the others do not.
        old_logprobs: of the policy that the update began with.
        rollout_logprobs: of the engine that chose the tokens.
        mask: 0 where the policy did not choose the token.
        lengths: [B] integers, tokens of each sample; they sum to P.
    """

    logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    rollout_logprobs: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    lengths: torch.Tensor

    def __post_init__(self) -> None:
        names = [field.name for field in fields(self) if field.name != "lengths"]
        shapes = {name: tuple(getattr(self, name).shape) for name in names}
        assert len(set(shapes.values())) == 1, f"all tensors are [P], not {shapes}"
        for name in names:
            object.__setattr__(self, name, widened(getattr(self, name)))


def widened(values: torch.Tensor) -> torch.Tensor:
    """Return `values` in float32, or float64 where they are."""
    return values if values.dtype == torch.float64 else values.float()


def masked_sum(values_P: torch.Tensor, mask_P: torch.Tensor) -> torch.Tensor:
    """Return the sum of `values_P` where `mask_P` is not 0; a NaN outside the mask does no harm."""
    return torch.where(mask_P > 0, widened(values_P), 0.0).sum()


def sample_sums(values_P: torch.Tensor, mask_P: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """Return [B] sums over the mask, one per sample."""
    kept_P = torch.where(mask_P > 0, widened(values_P), 0.0)
    samples_P = spread(torch.arange(len(lengths_B), device=lengths_B.device), lengths_B, len(values_P))
    return kept_P.new_zeros(len(lengths_B)).index_add(0, samples_P, kept_P)


def sample_means(values_P: torch.Tensor, mask_P: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """Return [B] means over the mask, one per sample; 0 for a sample without a token in it."""
    counts_B = sample_sums(mask_P, mask_P, lengths_B)
    return sample_sums(values_P, mask_P, lengths_B) / counts_B.clamp(min=1)


def turn_means(values_P: torch.Tensor, mask_P: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """Return [P]: at each token of the mask the mean over its turn, the run of such tokens in its sample; elsewhere it means nothing."""
    trained_P = mask_P > 0
    samples_P = spread(torch.arange(len(lengths_B), device=lengths_B.device), lengths_B, len(values_P))
    goes_on_P = torch.cat([torch.zeros_like(trained_P[:1]), trained_P[:-1] & (samples_P[1:] == samples_P[:-1])])
    turns_P = (trained_P & ~goes_on_P).cumsum(0)
    kept_P = torch.where(trained_P, widened(values_P), 0.0)
    sums, counts = (
        kept_P.new_zeros(len(kept_P) + 1).index_add(0, turns_P, of_P) for of_P in (kept_P, trained_P.to(kept_P))
    )
    return (sums / counts.clamp(min=1))[turns_P]


def spread(values_B: torch.Tensor, lengths_B: torch.Tensor, total: int) -> torch.Tensor:
    """Return [P]: the value of each sample at all its tokens.

    Args:
        total: P. Without it, the host would wait for a GPU to add up the lengths.
    """
    return values_B.repeat_interleave(lengths_B, output_size=total)


def bounded_exp(values: torch.Tensor) -> torch.Tensor:
    """Return exp of `values` clamped to [-20, 20]."""
    return values.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def ratio(logprobs_P: torch.Tensor, old_logprobs_P: torch.Tensor) -> torch.Tensor:
    """Return pi / pi_old per token, its logarithm clamped to [-20, 20]."""
    return bounded_exp(widened(logprobs_P) - widened(old_logprobs_P))


def clipped_surrogate(tokens: LossTokens, *, eps_clip_low: float, eps_clip_high: float) -> Values:
    """Return the clipped surrogate of PPO (arXiv:1707.06347, equation 7), with two bounds as in DAPO (arXiv:2503.14476).

    Formula:
        -min(r A, clip(r, 1 - eps_clip_low, 1 + eps_clip_high) A)
    Use:
        the usual choice; `eps_clip_high` above `eps_clip_low` (clip-higher) keeps exploration alive
    Returns:
        loss [P], and the sum of `clip_ratio`: tokens for which the clipped branch is the larger loss.
    """
    return _clipped(tokens, ratio(tokens.logprobs, tokens.old_logprobs), eps_clip_low, eps_clip_high)


def dual_clip(tokens: LossTokens, *, eps_clip_low: float, eps_clip_high: float, clip_ratio_c: float) -> Values:
    """Return the clipped surrogate, also bounded for negative advantages (arXiv:1912.09729).

    Formula:
        as regular, at most clip_ratio_c abs(A) where A < 0
    Use:
        several updates per batch, or stale samples: bad tokens with a large ratio cannot take over
    """
    loss_P, sums = clipped_surrogate(tokens, eps_clip_low=eps_clip_low, eps_clip_high=eps_clip_high)
    bounded_P = torch.minimum(-clip_ratio_c * tokens.advantages, loss_P)
    return torch.where(tokens.advantages < 0, bounded_P, loss_P), sums


def gspo(tokens: LossTokens, *, eps_clip_low: float, eps_clip_high: float) -> Values:
    """Return the clipped surrogate with one ratio per sample (GSPO, arXiv:2507.18071).

    r_t = stop(w) pi_t / stop(pi_t), where w = exp(mean over the sample of log pi - log pi_old), and its logarithm at most 10
    (GSPO-token). LUSPO is arXiv:2602.05261.

    Formula:
        as regular, with r = exp(mean over the sample of log π - log π_old); with `loss_reduction` seq_mean_token_sum it is LUSPO
    Use:
        mixture-of-experts models and long answers; clip ranges are 1000 times smaller than those of regular, and its `loss_reduction`
        is sequence_mean. LUSPO where answers become shorter and shorter with it
    """
    difference_P = tokens.logprobs.detach() - tokens.old_logprobs
    mean_B = sample_means(difference_P, tokens.mask, tokens.lengths)
    ratio_P = _with_gradient(tokens, spread(mean_B, tokens.lengths, len(difference_P)))
    return _clipped(tokens, ratio_P, eps_clip_low, eps_clip_high)


def turn_gspo(tokens: LossTokens, *, eps_clip_low: float, eps_clip_high: float) -> Values:
    """Return the clipped surrogate with one ratio per turn (chunks of interaction, arXiv:2512.24873).

    As gspo, where a turn is a run of trained tokens: what the environment or others answer ends it. With one turn per sample it is gspo.
    The source's code (https://github.com/alibaba/ROLL) clips it so, as its ratio of segments.

    Formula:
        as gspo, with the mean over the turn
    Use:
        agents of many turns: what went astray in one is clipped without the others, and single tokens upset nothing. Clip ranges lie between
        those of gspo and of regular. It is not worth it with one update per batch of fresh samples, where no ratio is clipped
    """
    difference_P = tokens.logprobs.detach() - tokens.old_logprobs
    ratio_P = _with_gradient(tokens, turn_means(difference_P, tokens.mask, tokens.lengths))
    return _clipped(tokens, ratio_P, eps_clip_low, eps_clip_high)


def ipa(tokens: LossTokens, *, ratio_high: Positive = 5.0) -> Values:
    """Return the gradient of the policy, weighted where it pushes down by the turn's ratio to the rollout (after IPA, arXiv:2512.24873, equation 9).

    A turn is as of turn_gspo. It is not equation 9 itself, which has two ratios and the sign of the sample's outcome:

    - Its weight is the ratio to the policy that sampled, as the trainer computes it, and its bound is on how far that policy is from itself in
      the engine. Of stale samples the trainer has the engine's log-probabilities alone. So the product of both ratios is weight and bound here.
    - Here the sign is that of the advantage. With turn_returns it is the same where only a sample's last turn is rewarded.

    The imitation of experts and the resampling of equation 10 are not part of it.

    Formula:
        -stop(u) A log π, u = 1 where A ≥ 0, else min(ρ, 1); 0 where ρ > ratio_high. ρ = exp(mean over the turn of log π/π_rollout)
    Use:
        asynchronous training of agents by rare successes, with turn_returns: these are imitated whole, and pushing down fades as turns
        become rare. Failures are pushed down only by a negative reward. It is not worth it on fresh samples: then it is gpg
    Args:
        ratio_high: turns whose geometric mean of probability ratios to the rollout is above this count nothing (after arXiv:2512.24873, which
            gives no number).
    Returns:
        loss [P], and the sum of `clip_ratio`: tokens of weight 0, or of a ratio that was lowered to 1.
    """
    ratio_P = bounded_exp(turn_means(tokens.logprobs.detach() - tokens.rollout_logprobs, tokens.mask, tokens.lengths))
    out_P = (ratio_P > ratio_high) | ((tokens.advantages < 0) & (ratio_P > 1))
    weight_P = torch.where(tokens.advantages < 0, ratio_P.clamp(max=1), 1.0)
    loss_P = -torch.where(ratio_P > ratio_high, 0.0, weight_P) * tokens.advantages * tokens.logprobs
    return loss_P, {"clip_ratio": masked_sum(out_P.float(), tokens.mask)}


def sapo(tokens: LossTokens, *, tau_pos: Positive = 1.0, tau_neg: Positive = 1.05) -> Values:
    """Return the loss with a soft gate (SAPO, arXiv:2511.20347).

    Nothing is clipped: `clip_ratio` is 0.

    Formula:
        -sigmoid(τ (r - 1)) 4/τ A, τ = tau_pos where A > 0, else tau_neg
    Use:
        clipping throws too many tokens away: a soft gate fades them out; its `loss_reduction` is sequence_mean
    Args:
        tau_pos: steepness of the gate around ratio 1 for positive advantages (arXiv:2511.20347).
        tau_neg: the same for other advantages; above tau_pos: they are damped sooner.
    """
    ratio_P = ratio(tokens.logprobs, tokens.old_logprobs)
    tau_P = torch.where(tokens.advantages > 0, tau_pos, tau_neg)
    gate_P = torch.sigmoid(tau_P * (ratio_P - 1)) * 4 / tau_P
    return -gate_P * tokens.advantages, {"clip_ratio": masked_sum(torch.zeros_like(ratio_P), tokens.mask)}


def cispo(tokens: LossTokens, *, cispo_eps_clip_low: Share = 0.0, cispo_eps_clip_high: NotNegative = 5.0) -> Values:
    """Return the loss with clipped weights (CISPO, arXiv:2506.13585).

    Formula:
        -stop(clip(r, 1 - cispo_eps_clip_low, 1 + cispo_eps_clip_high)) A log π
    Use:
        rare tokens (wait, however) must keep their gradient over several updates per batch
    Args:
        cispo_eps_clip_low: probability ratios below 1 - cispo_eps_clip_low are raised to that bound (arXiv:2506.13585).
        cispo_eps_clip_high: probability ratios above 1 + cispo_eps_clip_high are lowered to that bound.
    Returns:
        loss [P], and the sum of `clip_ratio`: tokens whose ratio is out of bounds.
    """
    ratio_P = ratio(tokens.logprobs.detach(), tokens.old_logprobs)
    clipped_P = ratio_P.clamp(1 - cispo_eps_clip_low, 1 + cispo_eps_clip_high)
    out = masked_sum((ratio_P != clipped_P).float(), tokens.mask)
    return -tokens.advantages * clipped_P * tokens.logprobs, {"clip_ratio": out}


def rollout_is(tokens: LossTokens, *, eps_clip_low: float, eps_clip_high: float) -> Values:
    """Return the loss weighted by the ratio to the rollout, 0 out of bounds (IcePop, https://ringtech.notion.site/icepop).

    Formula:
        -stop(u) A log π, u = π/π_rollout inside (1 - eps_clip_low, 1 + eps_clip_high), else 0
    Use:
        engine and trainer disagree, as with mixtures of experts
    Returns:
        loss [P], and the sum of `clip_ratio`: tokens whose ratio is out of bounds.
    """
    ratio_P = ratio(tokens.logprobs.detach(), tokens.rollout_logprobs)
    inside_P = (ratio_P > 1 - eps_clip_low) & (ratio_P < 1 + eps_clip_high)
    out = masked_sum((~inside_P).float(), tokens.mask)
    return -torch.where(inside_P, ratio_P, 0.0) * tokens.advantages * tokens.logprobs, {"clip_ratio": out}


def clip_cov(
    tokens: LossTokens,
    *,
    eps_clip_low: float,
    eps_clip_high: float,
    clip_ratio: Share = 0.0002,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
) -> Values:
    """Return the clipped surrogate without some tokens of high covariance (Clip-Cov, arXiv:2505.22617).

    Some tokens of the micro-batch are left out: a random share `clip_ratio` of all tokens, at least one. They are drawn from unclipped
    tokens whose covariance of advantage and log-probability lies between the bounds.

    Formula:
        as regular, without some drawn tokens of high covariance of A and log π
    Use:
        entropy collapses early
    Args:
        clip_ratio: share of the tokens of a micro-batch that is left out, drawn at random, at least one token (arXiv:2505.22617).
        clip_cov_lb: tokens may be left out whose covariance of advantage and log-probability is above this.
        clip_cov_ub: and below this.
    Returns:
        loss [P], and the sum of `clip_ratio`: tokens that were drawn.
    """
    ratio_P = ratio(tokens.logprobs, tokens.old_logprobs)
    plain_P = -ratio_P * tokens.advantages
    clipped_P = -ratio_P.clamp(1 - eps_clip_low, 1 + eps_clip_high) * tokens.advantages
    covariance_P = _covariance(tokens)
    free_P = (tokens.mask > 0) & (clipped_P <= plain_P)
    candidates_P = free_P & (covariance_P > clip_cov_lb) & (covariance_P < clip_cov_ub)
    wanted = (clip_ratio * tokens.mask.sum().double()).long().clamp(min=1)
    drawn_P = candidates_P & _among_highest(torch.where(candidates_P, torch.rand_like(plain_P), -1.0), wanted)
    loss_P = torch.where(drawn_P, 0.0, torch.maximum(plain_P, clipped_P))
    return loss_P, {"clip_ratio": masked_sum(drawn_P.float(), tokens.mask)}


def kl_cov(tokens: LossTokens, *, kl_cov_frac: Share = 0.2, ppo_kl_coef: NotNegative = 1.0) -> Values:
    """Return the loss with a divergence for tokens of high covariance (KL-Cov, arXiv:2505.22617).

    These are a share `kl_cov_frac` of the tokens of the micro-batch, at least one: those with the largest covariance of advantage
    and log-probability. Nothing is clipped: `clip_ratio` is 0.

    Formula:
        -r A + ppo_kl_coef abs(log r) for the tokens of highest covariance
    Use:
        entropy collapses early; steadier than clip_cov
    Args:
        kl_cov_frac: share of the tokens of a micro-batch, those of largest covariance of advantage and log-probability, that get a KL
            term (arXiv:2505.22617).
        ppo_kl_coef: weight of that term, |new - old log-probability|.
    """
    loss_P = -ratio(tokens.logprobs, tokens.old_logprobs) * tokens.advantages
    trained_P = tokens.mask > 0
    wanted = (trained_P.sum().double() * kl_cov_frac).long().clamp(min=1)
    covariance_P = torch.where(trained_P, _covariance(tokens), -torch.inf)
    high_P = trained_P & _among_highest(covariance_P, wanted)
    divergence_P = (tokens.logprobs - tokens.old_logprobs).abs()
    loss_P = loss_P + ppo_kl_coef * torch.where(high_P, divergence_P, 0.0)
    return loss_P, {"clip_ratio": masked_sum(torch.zeros_like(loss_P), tokens.mask)}


def cross_entropy(tokens: LossTokens) -> Values:
    """Return the negative log-likelihood of the tokens, without advantages.

    Nothing is clipped: `clip_ratio` is 0. Unlike SkyRL's, it obeys loss_reduction (token_sum gives SkyRL's sum) and excludes no KL
    or entropy term.

    Formula:
        -log π
    Use:
        imitation: the samples are what is wanted, whatever their rewards
    """
    return -tokens.logprobs, {"clip_ratio": masked_sum(torch.zeros_like(tokens.mask), tokens.mask)}


def importance_sampling(tokens: LossTokens) -> Values:
    """Return the surrogate of TRPO, the plain ratio (arXiv:1502.05477, equation 14).

    Unlike SkyRL's, it obeys loss_reduction (token_sum gives SkyRL's sum).

    Formula:
        -r A
    Use:
        one update per batch, or a correction below that bounds the ratio
    Returns:
        loss [P], and the sum of `importance_ratio`, r.
    """
    ratio_P = ratio(tokens.logprobs, tokens.old_logprobs)
    return -ratio_P * tokens.advantages, {"importance_ratio": masked_sum(ratio_P.detach(), tokens.mask)}


def aipo(tokens: LossTokens, *, aipo_rho: float) -> Values:
    """Return the loss with a ratio bounded on one side, for any sign of the advantage (AIPO, arXiv:2505.24034).

    Formula:
        -min(r, aipo_rho) A
    Use:
        asynchronous training: one bound for a ratio that was never meant to stay near 1
    Returns:
        loss [P], and the sum of `clip_ratio`: tokens whose ratio is above the bound.
    """
    ratio_P = ratio(tokens.logprobs, tokens.old_logprobs)
    above = masked_sum((ratio_P > aipo_rho).float(), tokens.mask)
    return -ratio_P.clamp(max=aipo_rho) * tokens.advantages, {"clip_ratio": above}


def dppo(
    tokens: LossTokens,
    *,
    dppo_type: Literal["binary_tv", "binary_kl"] = "binary_tv",
    delta_low: NotNegative = 0.2,
    delta_high: NotNegative = 0.2,
    two_sided: bool = False,
    kl_tau: NotNegative = 0.0,
) -> Values:
    """Return the loss of the tokens inside a trust region of divergence from the rollout (DPPO, arXiv:2602.04879, equations 11 to 14).

    On the way back to the rollout nothing is in a token's way, unless two_sided. The divergence is that between two outcomes, this token or any
    other: binary_tv, |pi - pi_rollout|, or binary_kl, KL(rollout || policy). Unlike a ratio, it lets rare tokens move, and holds
    frequent ones.

    Formula:
        -π/π_rollout A, 0 where the divergence is above delta_high (A > 0, π risen) or delta_low (A < 0, π fallen), two_sided: any A; + kl_tau (log π/π_rollout)²
    Use:
        large vocabularies: a ratio clips rare tokens too soon and frequent ones too late
    Args:
        dppo_type: divergence of the policy from the rollout, of this token against all others; binary_tv: difference of the
            probabilities, binary_kl: KL(rollout || policy) in nats (arXiv:2602.04879).
        delta_low: tokens of negative advantage count nothing once the policy has fallen from the rollout by a divergence above this;
            0.05 is usual with binary_kl.
        delta_high: the same for tokens of positive advantage and a policy that has risen.
        two_sided: the deltas bound tokens of any advantage, also those on the way back to the rollout (prime-rl's IPO, with deltas of 0.3).
        kl_tau: weight of (log π/π_rollout)², which is added for every token, masked or not (prime-rl's default loss until August 2026,
            with 0.001).
    Returns:
        loss [P], and the sum of `clip_ratio`: tokens that count nothing.
    """
    assert dppo_type in ("binary_tv", "binary_kl"), f"no divergence {dppo_type}"
    logprobs_P, rollout_P = tokens.logprobs.detach(), tokens.rollout_logprobs
    if dppo_type == "binary_tv":
        divergence_P = (logprobs_P.clamp(max=0).exp() - rollout_P.clamp(max=0).exp()).abs()
    else:
        divergence_P = binary_kl(rollout_P, logprobs_P)
    risen_P, fallen_P = tokens.logprobs > tokens.rollout_logprobs, tokens.logprobs < tokens.rollout_logprobs
    out_P = ((tokens.advantages > 0) | two_sided) & risen_P & (divergence_P > delta_high)
    out_P = out_P | (((tokens.advantages < 0) | two_sided) & fallen_P & (divergence_P > delta_low))
    loss_P = -ratio(tokens.logprobs, tokens.rollout_logprobs) * tokens.advantages
    penalty_P = kl_tau * (tokens.logprobs - tokens.rollout_logprobs).square() if kl_tau else 0.0
    return torch.where(out_P, 0.0, loss_P) + penalty_P, {"clip_ratio": masked_sum(out_P.float(), tokens.mask)}


def gpg(tokens: LossTokens) -> Values:
    """Return the gradient of the policy without a ratio (GPG, arXiv:2504.02546, equation 3).

    It is right for samples of the policy itself. With zero_variance_filter the mean over tokens leaves groups out that teach
    nothing, which is the paper's factor for them.

    Formula:
        -A log π
    Use:
        strictly on-policy training with one update per batch, nothing to tune; with `zero_variance_filter`
    """
    return -tokens.advantages * tokens.logprobs, {}


def gmpo(tokens: LossTokens, *, log_clip_low: NotNegative = 0.4, log_clip_high: NotNegative = 0.4) -> Values:
    """Return the loss with the geometric mean of a sample's clipped ratios (GMPO, arXiv:2507.20673, equation 4).

    Logarithms of ratios are lowered to log_clip_high where A > 0, and raised to -log_clip_low where A < 0; their mean is at most
    10.

    Formula:
        -A exp(mean over the sample of clipped log r)
    Use:
        single outliers among a sample's ratios upset grpo; its `loss_reduction` is sequence_mean
    Args:
        log_clip_low: logarithms of probability ratios below -log_clip_low are raised to it, where the advantage is negative
            (arXiv:2507.20673).
        log_clip_high: those above log_clip_high are lowered to it, where the advantage is positive.
    Returns:
        loss [P], and the sum of `clip_ratio`: tokens whose ratio was clipped.
    """
    log_ratio_P = tokens.logprobs - tokens.old_logprobs
    high_P = torch.where(tokens.advantages > 0, log_clip_high, torch.inf)
    low_P = torch.where(tokens.advantages < 0, -log_clip_low, -torch.inf)
    clipped_P = torch.clamp(log_ratio_P, low_P, high_P)
    mean_B = sample_means(clipped_P, tokens.mask, tokens.lengths).clamp(max=_MAX_LOG_SAMPLE_RATIO)
    loss_P = -spread(mean_B.exp(), tokens.lengths, len(clipped_P)) * tokens.advantages
    return loss_P, {"clip_ratio": masked_sum((clipped_P != log_ratio_P).float(), tokens.mask)}


def vespo(
    tokens: LossTokens,
    *,
    k_pos: NotNegative = 2.0,
    lambda_pos: NotNegative = 3.0,
    k_neg: NotNegative = 3.0,
    lambda_neg: NotNegative = 2.0,
) -> Values:
    """Return the loss weighted smoothly by the ratio of whole samples (VESPO, arXiv:2602.10693).

    W is between 1e-8 and exp(20). The weight is 1 at W = 1: samples far from the rollout fade out, those that have become rare
    slowly, those that have become frequent fast. Nothing is clipped.

    Formula:
        -stop(W^k exp(λ (1 - W))) A log π, W = product over the sample of π/π_rollout; (k, λ) = (k_pos, lambda_pos) for A ≥ 0, else (k_neg,
        lambda_neg)
    Use:
        stale samples, asynchronous training, mixtures of experts: whole samples fade out smoothly, without a correction beside it
    Args:
        k_pos: exponent of a sample's probability ratio to the rollout in its weight, for advantages that are not negative
            (arXiv:2602.10693). With a larger one, samples that have become rare count less.
        lambda_pos: rate at which the weight falls for these where the ratio is large.
        k_neg: the exponent for negative advantages.
        lambda_neg: the rate for negative advantages.
    Returns:
        loss [P], and the sum of `sample_weight`.
    """
    difference_P = (tokens.logprobs.detach() - tokens.rollout_logprobs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    log_B = sample_sums(difference_P, tokens.mask, tokens.lengths).clamp(_LEAST_LOG_WEIGHT, _MAX_LOG_RATIO)
    log_P, better_P = spread(log_B, tokens.lengths, len(difference_P)), tokens.advantages >= 0
    k_P, lambda_P = torch.where(better_P, k_pos, k_neg), torch.where(better_P, lambda_pos, lambda_neg)
    weight_P = (k_P * log_P + lambda_P * (1 - log_P.exp())).exp()
    loss_P = -weight_P * tokens.advantages * tokens.logprobs
    return loss_P, {"sample_weight": masked_sum(weight_P, tokens.mask)}


def dro(tokens: LossTokens, *, beta: NotNegative = 1.0) -> Values:
    """Return the policy gradient with a squared penalty in place of a ratio (DRO, arXiv:2405.19107 and arXiv:2501.12599).

    Per token as in Tinker. The source fits a value beside it; here the advantage estimator's baseline stands for it.

    Formula:
        -(A log π - beta/2 (log π/π_rollout)²)
    Use:
        samples of any age, also of another policy: a squared penalty holds the policy near the sampling one, no ratio explodes. Tokens are
        drawn to log π/π_rollout = A/beta. Beta 0.05 held the quickstart too little (0.75 after 30 steps with a staleness of 2, 0.98 with
        beta 1)
    Args:
        beta: weight of the squared logarithm of the probability ratio to the rollout, half of which is added to the loss
            (arXiv:2405.19107). A token is drawn to the logarithm A / beta, so that beta depends on the size of the advantages, about 1
            with grpo.
    Returns:
        loss [P], and the sum of `squared_log_ratio`, (log pi - log pi_rollout)^2.
    """
    squared_P = (tokens.logprobs - tokens.rollout_logprobs).square()
    loss_P = beta / 2 * squared_P - tokens.advantages * tokens.logprobs
    return loss_P, {"squared_log_ratio": masked_sum(squared_P.detach(), tokens.mask)}


def m2po(tokens: LossTokens, *, threshold: Positive = 0.04) -> Values:
    """Return the ratio to the rollout without the tokens that have gone farthest from it (M2PO, arXiv:2510.01161, algorithm 1).

    As many of the tokens that PPO might clip count nothing as it takes.

    Formula:
        -π/π_rollout A, 0 for tokens of largest (log π/π_rollout)² until the mean is threshold, for A > 0 and π risen, or A < 0
        and π fallen
    Use:
        very stale samples (the paper: 256 updates): a fraction of the tokens that clipping would lose. The tokens of a micro-batch are
        compared, the paper's are those of a mini-batch
    Args:
        threshold: bound of the mean of the squared logarithms of probability ratios to the rollout, over tokens that move away from it.
            The largest are left out until the mean is within the bound (arXiv:2510.01161).
    Returns:
        loss [P], and the sum of `clip_ratio`: tokens that count nothing.
    """
    log_P = (tokens.logprobs.detach() - tokens.rollout_logprobs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    pushed_P = (tokens.mask > 0) & (tokens.advantages * log_P > 0)
    squared_P = torch.where(pushed_P, log_P.square(), torch.inf)
    means_P = squared_P.sort().values.double().cumsum(0) / torch.arange(1, len(log_P) + 1, device=log_P.device)
    out_P = pushed_P & (squared_P.argsort().argsort() >= (means_P <= threshold).sum())
    loss_P = -ratio(tokens.logprobs, tokens.rollout_logprobs) * tokens.advantages
    return torch.where(out_P, 0.0, loss_P), {"clip_ratio": masked_sum(out_P.float(), tokens.mask)}


def binary_kl(logprobs_P: torch.Tensor, other_logprobs_P: torch.Tensor) -> torch.Tensor:
    """Return KL(first || other) over two outcomes, this token or any other, [P]."""
    log_P, other_log_P = logprobs_P.clamp(max=0), other_logprobs_P.clamp(max=0)
    rest_P, other_rest_P = (-torch.expm1(log).clamp(max=-_LEAST_PROBABILITY) for log in (log_P, other_log_P))
    return log_P.exp() * (log_P - other_log_P) + rest_P * (rest_P / other_rest_P).log()


def _with_gradient(tokens: LossTokens, log_ratio_P: torch.Tensor) -> torch.Tensor:
    """Return exp of logarithms of ratios that tokens share, at most 10, each with the gradient of its own token."""
    return (tokens.logprobs - tokens.logprobs.detach() + log_ratio_P).clamp(max=_MAX_LOG_SAMPLE_RATIO).exp()


def _clipped(tokens: LossTokens, ratio_P: torch.Tensor, low: float, high: float) -> Values:
    plain_P = -ratio_P * tokens.advantages
    clipped_P = -ratio_P.clamp(1 - low, 1 + high) * tokens.advantages
    clipped = masked_sum((clipped_P > plain_P).float(), tokens.mask)
    return torch.maximum(plain_P, clipped_P), {"clip_ratio": clipped}


def _covariance(tokens: LossTokens) -> torch.Tensor:
    """Return [P] what each token of the micro-batch adds to the covariance of advantage and log-probability."""
    count = tokens.mask.sum().clamp(min=1)
    logprobs_P = tokens.logprobs.detach()
    advantage = masked_sum(tokens.advantages, tokens.mask) / count
    return (tokens.advantages - advantage) * (logprobs_P - masked_sum(logprobs_P, tokens.mask) / count)


def _among_highest(values_P: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Return [P] whether each value is one of the `count` highest; without topk or nonzero, which make the host wait for a GPU."""
    return values_P.argsort(descending=True).argsort() < count


POLICY_LOSSES: dict[str, Loss] = {
    "regular": clipped_surrogate,
    "dual_clip": dual_clip,
    "gspo": gspo,
    "turn_gspo": turn_gspo,
    "sapo": sapo,
    "cispo": cispo,
    "rollout_is": rollout_is,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "aipo": aipo,
    "dppo": dppo,
    "gpg": gpg,
    "gmpo": gmpo,
    "vespo": vespo,
    "dro": dro,
    "m2po": m2po,
    "ipa": ipa,
}
