"""Learning from a teacher that judges the policy's own samples (on-policy distillation, R. Agarwal et al., arXiv:2306.13649).

How far the policy is from the teacher at a token is a penalty on the token's advantage: then any policy loss follows. Of the sampled token
alone that is k1 of hpcrl/algorithms/kl.py, a sample of the reverse KL divergence, with the policy's log-probabilities detached.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hpcrl.algorithms.advantages import AdvantageInputs, lambda_returns


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

    With a discount, the divergences of the sample's later trained tokens count too, by one more power of it per token, and no
    gradient flows through them: a divergence is part of many advantages then, and would be differentiated in each.

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
