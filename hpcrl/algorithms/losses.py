"""Policy losses per token, from log-probabilities.

A loss gives [P] values and the sums of its own metrics over the mask. It neither divides nor knows the mini-batch: who calls it
multiplies by the weights of hpcrl/algorithms/reductions.py and adds everything up, so that nothing depends on packing, micro-batch
size or number of ranks. The exceptions are clip_cov, kl_cov and m2po, which compare a token with the others of its micro-batch.

A loss's other parameters are its settings (hpcrl/algorithms/settings.py). A user's own has the same signature, and is named as
"package.module:function".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

_MAX_LOG_RATIO = 20.0
_MAX_LOG_SAMPLE_RATIO = 10.0
_LEAST_PROBABILITY = 1e-8
_LEAST_LOG_WEIGHT = math.log(1e-8)

Values = tuple[torch.Tensor, dict[str, torch.Tensor]]
Loss = Callable[..., Values]
"""(tokens, its settings by keyword) -> loss [P], and sums over the mask of metrics, by name."""


@dataclass(frozen=True)
class Tokens:
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


def clipped_surrogate(tokens: Tokens, *, eps_clip_low: float, eps_clip_high: float) -> Values:
    """Return PPO's clipped surrogate loss (arXiv:1707.06347, equation 7; two bounds as in DAPO, arXiv:2503.14476).

    -min(r A, clip(r, 1 - eps_clip_low, 1 + eps_clip_high) A) with r = pi / pi_old.

    Returns:
        loss [P], and the sum of `clip_ratio`: tokens for which the clipped branch is the larger loss.
    """
    return _clipped(tokens, ratio(tokens.logprobs, tokens.old_logprobs), eps_clip_low, eps_clip_high)


def dual_clip(tokens: Tokens, *, eps_clip_low: float, eps_clip_high: float, clip_ratio_c: float) -> Values:
    """Return the clipped surrogate, at most clip_ratio_c |A| where A < 0 (arXiv:1912.09729)."""
    loss_P, sums = clipped_surrogate(tokens, eps_clip_low=eps_clip_low, eps_clip_high=eps_clip_high)
    bounded_P = torch.minimum(-clip_ratio_c * tokens.advantages, loss_P)
    return torch.where(tokens.advantages < 0, bounded_P, loss_P), sums


def gspo(tokens: Tokens, *, eps_clip_low: float, eps_clip_high: float) -> Values:
    """Return the clipped surrogate with one ratio per sample (GSPO-token, arXiv:2507.18071).

    r_t = stop(w) pi_t / stop(pi_t), where w = exp(mean over the sample of log pi - log pi_old), and its logarithm at most 10.
    """
    difference_P = tokens.logprobs.detach() - tokens.old_logprobs
    mean_B = sample_means(difference_P, tokens.mask, tokens.lengths)
    log_ratio_P = spread(mean_B, tokens.lengths, len(difference_P))
    log_ratio_P = tokens.logprobs - tokens.logprobs.detach() + log_ratio_P
    return _clipped(tokens, log_ratio_P.clamp(max=_MAX_LOG_SAMPLE_RATIO).exp(), eps_clip_low, eps_clip_high)


def sapo(tokens: Tokens, *, tau_pos: float, tau_neg: float) -> Values:
    """Return the soft-gated loss (SAPO, arXiv:2511.20347).

    -sigmoid(tau (r - 1)) 4 / tau A, with tau = tau_pos where A > 0, else tau_neg. Nothing is clipped: `clip_ratio` is 0.
    """
    ratio_P = ratio(tokens.logprobs, tokens.old_logprobs)
    tau_P = torch.where(tokens.advantages > 0, tau_pos, tau_neg)
    gate_P = torch.sigmoid(tau_P * (ratio_P - 1)) * 4 / tau_P
    return -gate_P * tokens.advantages, {"clip_ratio": masked_sum(torch.zeros_like(ratio_P), tokens.mask)}


def cispo(tokens: Tokens, *, cispo_eps_clip_low: float, cispo_eps_clip_high: float) -> Values:
    """Return the loss with clipped weights (CISPO, arXiv:2506.13585): -stop(clip(r)) A log pi.

    Returns:
        loss [P], and the sum of `clip_ratio`: tokens whose ratio is out of bounds.
    """
    ratio_P = ratio(tokens.logprobs.detach(), tokens.old_logprobs)
    clipped_P = ratio_P.clamp(1 - cispo_eps_clip_low, 1 + cispo_eps_clip_high)
    out = masked_sum((ratio_P != clipped_P).float(), tokens.mask)
    return -tokens.advantages * clipped_P * tokens.logprobs, {"clip_ratio": out}


def rollout_is(tokens: Tokens, *, eps_clip_low: float, eps_clip_high: float) -> Values:
    """Return the loss weighted by the ratio to the rollout (IcePop, https://ringtech.notion.site/icepop): -stop(w) A log pi.

    w = pi / pi_rollout inside (1 - eps_clip_low, 1 + eps_clip_high), else 0.

    Returns:
        loss [P], and the sum of `clip_ratio`: tokens whose ratio is out of bounds.
    """
    ratio_P = ratio(tokens.logprobs.detach(), tokens.rollout_logprobs)
    inside_P = (ratio_P > 1 - eps_clip_low) & (ratio_P < 1 + eps_clip_high)
    out = masked_sum((~inside_P).float(), tokens.mask)
    return -torch.where(inside_P, ratio_P, 0.0) * tokens.advantages * tokens.logprobs, {"clip_ratio": out}


def clip_cov(
    tokens: Tokens,
    *,
    eps_clip_low: float,
    eps_clip_high: float,
    clip_ratio: float,
    clip_cov_lb: float,
    clip_cov_ub: float,
) -> Values:
    """Return the clipped surrogate without some tokens of high covariance (Clip-Cov, arXiv:2505.22617).

    Of the tokens of the micro-batch that are not clipped and whose covariance of advantage and log-probability lies between the
    bounds, a share `clip_ratio` of all tokens, at least one, is drawn at random and left out.

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


def kl_cov(tokens: Tokens, *, kl_cov_frac: float, ppo_kl_coef: float) -> Values:
    """Return -r A, plus ppo_kl_coef |log pi - log pi_old| for tokens of high covariance (KL-Cov, arXiv:2505.22617).

    These are a share `kl_cov_frac` of the tokens of the micro-batch, at least one: those with the largest covariance of advantage
    and log-probability. Nothing is clipped: `clip_ratio` is 0.
    """
    loss_P = -ratio(tokens.logprobs, tokens.old_logprobs) * tokens.advantages
    trained_P = tokens.mask > 0
    wanted = (trained_P.sum().double() * kl_cov_frac).long().clamp(min=1)
    covariance_P = torch.where(trained_P, _covariance(tokens), -torch.inf)
    high_P = trained_P & _among_highest(covariance_P, wanted)
    divergence_P = (tokens.logprobs - tokens.old_logprobs).abs()
    loss_P = loss_P + ppo_kl_coef * torch.where(high_P, divergence_P, 0.0)
    return loss_P, {"clip_ratio": masked_sum(torch.zeros_like(loss_P), tokens.mask)}


def cross_entropy(tokens: Tokens) -> Values:
    """Return -log pi: the likelihood of the tokens, whatever their advantages. Nothing is clipped: `clip_ratio` is 0.

    Unlike SkyRL's, it obeys loss_reduction (token_sum gives SkyRL's sum) and excludes no KL or entropy term.
    """
    return -tokens.logprobs, {"clip_ratio": masked_sum(torch.zeros_like(tokens.mask), tokens.mask)}


def importance_sampling(tokens: Tokens) -> Values:
    """Return -r A, the plain ratio (the surrogate of TRPO, arXiv:1502.05477, equation 14).

    Unlike SkyRL's, it obeys loss_reduction (token_sum gives SkyRL's sum).

    Returns:
        loss [P], and the sum of `importance_ratio`, r.
    """
    ratio_P = ratio(tokens.logprobs, tokens.old_logprobs)
    return -ratio_P * tokens.advantages, {"importance_ratio": masked_sum(ratio_P.detach(), tokens.mask)}


def aipo(tokens: Tokens, *, aipo_rho: float) -> Values:
    """Return -min(r, aipo_rho) A, a ratio bounded on one side whatever the advantage (AIPO, arXiv:2505.24034).

    Returns:
        loss [P], and the sum of `clip_ratio`: tokens whose ratio is above the bound.
    """
    ratio_P = ratio(tokens.logprobs, tokens.old_logprobs)
    above = masked_sum((ratio_P > aipo_rho).float(), tokens.mask)
    return -ratio_P.clamp(max=aipo_rho) * tokens.advantages, {"clip_ratio": above}


def dppo(tokens: Tokens, *, dppo_type: str, delta_low: float, delta_high: float) -> Values:
    """Return -r A of the tokens inside a trust region of divergence (DPPO, arXiv:2602.04879, equations 11 to 14).

    r = pi / pi_rollout. A token counts nothing where the divergence from the rollout is above delta_high while A > 0 and pi has
    risen, or above delta_low while A < 0 and pi has fallen: on the way back nothing is in its way. The divergence is that between
    two outcomes, this token or any other: binary_tv, |pi - pi_rollout|, or binary_kl, KL(rollout || policy). Unlike a ratio, it
    lets rare tokens move, and holds frequent ones.

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
    out_P = (tokens.advantages > 0) & risen_P & (divergence_P > delta_high)
    out_P = out_P | ((tokens.advantages < 0) & fallen_P & (divergence_P > delta_low))
    loss_P = -ratio(tokens.logprobs, tokens.rollout_logprobs) * tokens.advantages
    return torch.where(out_P, 0.0, loss_P), {"clip_ratio": masked_sum(out_P.float(), tokens.mask)}


def gpg(tokens: Tokens) -> Values:
    """Return -A log pi, the gradient of the policy without a ratio (GPG, arXiv:2504.02546, equation 3).

    It is right for samples of the policy itself. With zero_variance_filter the mean over tokens leaves groups out that teach
    nothing, which is the paper's factor for them.
    """
    return -tokens.advantages * tokens.logprobs, {}


def gmpo(tokens: Tokens, *, log_clip_low: float, log_clip_high: float) -> Values:
    """Return -w A, with the geometric mean w of the sample's clipped ratios (GMPO, arXiv:2507.20673, equation 4).

    Logarithms of ratios are lowered to log_clip_high where A > 0, and raised to -log_clip_low where A < 0; their mean is at most
    10. The paper's mean over samples is loss_reduction=sequence_mean.

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


def vespo(tokens: Tokens, *, k_pos: float, lambda_pos: float, k_neg: float, lambda_neg: float) -> Values:
    """Return the loss weighted smoothly by the ratio of whole samples (VESPO, arXiv:2602.10693): -stop(phi(W)) A log pi.

    W is the product over the sample of pi / pi_rollout, from 1e-8 to exp(20), and phi(W) = W^k exp(lambda (1 - W)), which is 1 at
    W = 1, with k_pos and lambda_pos where A >= 0, else k_neg and lambda_neg: samples far from the rollout fade out, those that have
    become rare slowly, those that have become frequent fast. Nothing is clipped.

    Returns:
        loss [P], and the sum of `sample_weight`, phi(W).
    """
    difference_P = (tokens.logprobs.detach() - tokens.rollout_logprobs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    log_B = sample_sums(difference_P, tokens.mask, tokens.lengths).clamp(_LEAST_LOG_WEIGHT, _MAX_LOG_RATIO)
    log_P, better_P = spread(log_B, tokens.lengths, len(difference_P)), tokens.advantages >= 0
    k_P, lambda_P = torch.where(better_P, k_pos, k_neg), torch.where(better_P, lambda_pos, lambda_neg)
    weight_P = (k_P * log_P + lambda_P * (1 - log_P.exp())).exp()
    loss_P = -weight_P * tokens.advantages * tokens.logprobs
    return loss_P, {"sample_weight": masked_sum(weight_P, tokens.mask)}


def dro(tokens: Tokens, *, beta: float) -> Values:
    """Return -(A log pi - beta / 2 (log pi - log pi_rollout)^2) (DRO, arXiv:2405.19107 and 2501.12599, per token as in Tinker).

    The policy gradient of samples of any origin, held near the policy that they come from by a squared penalty in place of a ratio.
    The source fits a value beside it; here the advantage estimator's baseline stands for it.

    Returns:
        loss [P], and the sum of `squared_log_ratio`, (log pi - log pi_rollout)^2.
    """
    squared_P = (tokens.logprobs - tokens.rollout_logprobs).square()
    loss_P = beta / 2 * squared_P - tokens.advantages * tokens.logprobs
    return loss_P, {"squared_log_ratio": masked_sum(squared_P.detach(), tokens.mask)}


def m2po(tokens: Tokens, *, threshold: float) -> Values:
    """Return -r A without the tokens that have gone farthest from the rollout (M2PO, arXiv:2510.01161, algorithm 1).

    r = pi / pi_rollout. Among the tokens that PPO might clip, those with A > 0 and r > 1 or A < 0 and r < 1, as many of largest
    (log r)^2 count nothing as it takes for its mean over the others to be at most `threshold`. The paper sorts the tokens of a
    mini-batch, this one those of a micro-batch.

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


def _clipped(tokens: Tokens, ratio_P: torch.Tensor, low: float, high: float) -> Values:
    plain_P = -ratio_P * tokens.advantages
    clipped_P = -ratio_P.clamp(1 - low, 1 + high) * tokens.advantages
    clipped = masked_sum((clipped_P > plain_P).float(), tokens.mask)
    return torch.maximum(plain_P, clipped_P), {"clip_ratio": clipped}


def _covariance(tokens: Tokens) -> torch.Tensor:
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
}
