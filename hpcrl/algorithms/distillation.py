"""Learning from a teacher that judges the policy's own samples (on-policy distillation, R. Agarwal et al., arXiv:2306.13649).

How far the policy is from the teacher at a token is a penalty on the token's advantage: then any policy loss follows. Of the sampled token
alone that is k1 of hpcrl/algorithms/kl.py, a sample of the reverse KL divergence, with the policy's log-probabilities detached. Of several
tokens it is `jensen_shannon`, which is also differentiated itself where it is not discounted: the loss -r A pulls the policy towards the
teacher by both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hpcrl.algorithms.advantages import AdvantageInputs, lambda_returns
from hpcrl.algorithms.losses import sample_sums, spread, widened

_LEAST_TOTAL = 1e-8


def jensen_shannon(logprobs_PK: torch.Tensor, teacher_logprobs_PK: torch.Tensor, beta: float) -> torch.Tensor:
    """Return the generalized Jensen-Shannon divergence over K tokens of each position, [P] (arXiv:2306.13649, section 2).

    beta KL(q || m) + (1 - beta) KL(p || m) with the policy p, the teacher q and m = (1 - beta) p + beta q. The limits, divided by
    beta and by 1 - beta, take the place of 0 where beta is 0, KL(q || p), and where it is 1, KL(p || q). The probabilities of the
    K tokens need not sum to 1, so that the sums may be negative.

    Args:
        logprobs_PK: of the policy; gradients flow through them.
        teacher_logprobs_PK: of the same tokens; finite, so that an engine which filters tokens out must not be asked.
        beta: from 0 to 1.
    """
    assert logprobs_PK.shape == teacher_logprobs_PK.shape, (
        f"{tuple(logprobs_PK.shape)} and {tuple(teacher_logprobs_PK.shape)}"
    )
    assert 0 <= beta <= 1, f"beta is from 0 to 1, not {beta}"
    policy_PK, teacher_PK = widened(logprobs_PK), widened(teacher_logprobs_PK)
    if beta == 0:
        return _divergence(teacher_PK, policy_PK)
    if beta == 1:
        return _divergence(policy_PK, teacher_PK)
    shares = torch.tensor([1 - beta, beta], dtype=policy_PK.dtype, device=policy_PK.device).log()
    mixture_PK = torch.logaddexp(policy_PK + shares[0], teacher_PK + shares[1])
    return beta * _divergence(teacher_PK, mixture_PK) + (1 - beta) * _divergence(policy_PK, mixture_PK)


def teacher_advantages(
    advantages_P: torch.Tensor,
    divergences_P: torch.Tensor,
    mask_P: torch.Tensor,
    lengths: Sequence[int],
    *,
    kl_penalty_coef: float,
    kl_discount_factor: float,
) -> torch.Tensor:
    """Return advantages less the weighted divergence from the teacher, [P]; what they were where the mask is 0.

    With a discount, the divergences of the sample's later trained tokens count too, by one more power of it per token. No gradient flows
    through them: each divergence is part of many advantages, and would be differentiated in each.

    Args:
        lengths: tokens of each sample; they sum to P.
    """
    penalty_P = torch.where(mask_P > 0, divergences_P, 0.0)
    if kl_discount_factor != 0:
        penalty_P = penalty_P.detach()
        groups_B = torch.zeros(len(lengths), dtype=torch.int64)
        inputs = AdvantageInputs(penalty_P, mask_P, lengths, groups_B)
        penalty_P = lambda_returns(inputs, torch.zeros_like(penalty_P), kl_discount_factor, 1.0)
    return advantages_P - kl_penalty_coef * penalty_P


def spread_over_spans(
    logprobs_T: torch.Tensor, teacher_logprobs_U: torch.Tensor, spans_T: torch.Tensor, spans_U: torch.Tensor
) -> torch.Tensor:
    """Return a teacher's log-probability of each of the policy's T tokens, from those of its own U tokens of the same text, [T].

    Over each span (hpcrl/data/alignment.py) they sum to the teacher's. Each of the span's n tokens has log π + (M - L) / n. L and M
    are the sums over the span of the policy's and of the teacher's log-probabilities. So each keeps the policy's share of its span (arXiv:2606.09456, section 4), and a span of one token has the teacher's own.

    Args:
        logprobs_T: of the policy, when it sampled.
        spans_T, spans_U: number of each token's span; below 0 for a token of none, whose result is 0.
    """
    own_T, own_U = spans_T >= 0, spans_U >= 0
    sums = logprobs_T.new_zeros(int(spans_T.max()) + 1 if own_T.any() else 0, dtype=torch.float64)
    theirs, counts = torch.zeros_like(sums), torch.zeros_like(sums)
    sums.index_add_(0, spans_T[own_T], logprobs_T[own_T].double())
    theirs.index_add_(0, spans_U[own_U], teacher_logprobs_U[own_U].double())
    counts.index_add_(0, spans_T[own_T], torch.ones(int(own_T.sum()), dtype=torch.float64))
    found_T = torch.zeros_like(logprobs_T)
    excess_T = ((theirs - sums) / counts)[spans_T[own_T]]
    found_T[own_T] = (logprobs_T[own_T].double() + excess_T).to(found_T.dtype)
    return found_T


def drift_weights(
    divergences_P: torch.Tensor, mask_P: torch.Tensor, lengths_B: torch.Tensor, gamma: float
) -> torch.Tensor:
    """Return the weight of each token's divergence, [P] (IW-OPD, arXiv:2606.22600, algorithm 1).

    1 + gamma (1 - F), where F is the share of the sample's absolute divergences, over trained tokens, that came before the token. So it
    is 1 + gamma at a sample's first trained token, and falls towards 1 as the sample drifts from what the teacher would write.

    Args:
        divergences_P: of either sign, of the sampled tokens; no gradient flows through them.
        lengths_B: tokens of each sample; they sum to P.
    """
    sizes_P = torch.where(mask_P > 0, divergences_P.detach().double().abs(), 0.0)
    totals_B = sample_sums(sizes_P, mask_P, lengths_B)
    earlier_B = totals_B.cumsum(0) - totals_B
    before_P = sizes_P.cumsum(0) - sizes_P - spread(earlier_B, lengths_B, len(sizes_P))
    share_P = before_P / spread(totals_B, lengths_B, len(sizes_P)).clamp(min=_LEAST_TOTAL)
    return (1 + gamma * (1 - share_P.clamp(0, 1))).to(divergences_P.dtype)


def hint_contrasts(right_P: torch.Tensor, wrong_KP: torch.Tensor) -> torch.Tensor:
    """Return the contrast of hints at each token, [P] (RLCSD, arXiv:2606.11709v1, equation 7).

    log π_T(y | right hint) - log (1/K Σ π_T(y | wrong hint k)): what any hint changes, such as style, cancels. 0 without wrong hints.

    Args:
        right_P: log-probabilities behind the right hint.
        wrong_KP: behind at most K wrong ones; -inf where a sample has fewer.
    """
    counts_P = (wrong_KP > -torch.inf).to(wrong_KP.dtype).sum(0)
    return torch.where(counts_P > 0, right_P - wrong_KP.logsumexp(0) + counts_P.log(), 0.0)


def modulations(
    contrasts_P: torch.Tensor, mask_P: torch.Tensor, *, scale: float, width: float, threshold: float
) -> torch.Tensor:
    """Return what contrasts of hints add to advantages, [P] (RLCSD, arXiv:2606.11709v1, equations 9 and 10).

    That is scale tanh(contrast / width); 0 where it is within ±threshold, or nothing is trained.
    """
    found_P = scale * torch.tanh(contrasts_P / width)
    return torch.where((found_P.abs() > threshold) & (mask_P > 0), found_P, 0.0)


def contrastive_advantages(
    advantages_P: torch.Tensor,
    modulations_P: torch.Tensor,
    mask_P: torch.Tensor,
    lengths_B: torch.Tensor,
    *,
    weight: float,
) -> torch.Tensor:
    """Return advantages with the modulations of their tokens added, [P] (RLCSD, arXiv:2606.11709v1, equations 11 and 15).

    No advantage changes its sign: one that would becomes 0. A sample's trained tokens, modulated or not, are two sets, each with a mean
    of its own. Of n tokens m are modulated: their advantages are multiplied by weight n / m, the others by n / (n - m).

    The factors have no bound, as in the paper: one modulated token alone is the mean of its set. Those of the modulated tokens sum to
    weight n, and those of the others to n, however few a set has. How many hints were right or wrong is in none of them.

    Not from the paper: it writes two means of losses. Factors of advantages are the same for a loss that is proportional to the
    advantage, with any reduction. And an advantage of 0 stays 0, where equation 11 takes it as positive.

    Args:
        lengths_B: tokens of each sample; they sum to P.
    """
    trained_P, modulated_P = (mask_P > 0).double(), (modulations_P != 0).double()
    tokens_B = sample_sums(trained_P, trained_P, lengths_B)
    modulated_B = sample_sums(modulated_P, trained_P, lengths_B)
    of_modulated_P = weight * spread(tokens_B / modulated_B.clamp(min=1), lengths_B, len(mask_P))
    of_others_P = spread(tokens_B / (tokens_B - modulated_B).clamp(min=1), lengths_B, len(mask_P))
    sums_P = advantages_P + modulations_P
    signed_P = torch.where(advantages_P * sums_P > 0, sums_P, 0.0)
    found_P = torch.where(modulated_P > 0, of_modulated_P * signed_P, of_others_P * advantages_P)
    return torch.where(mask_P > 0, found_P, advantages_P).to(advantages_P.dtype)


def _divergence(logprobs_PK: torch.Tensor, other_PK: torch.Tensor) -> torch.Tensor:
    return (logprobs_PK.exp() * (logprobs_PK - other_PK)).sum(-1)
