"""The Bradley-Terry loss of reward models, from the scores of pairs of answers; as TRL's RewardTrainer 1.16, with which tests compare it."""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid


def bradley_terry(
    chosen_N: torch.Tensor, rejected_N: torch.Tensor, margins_N: torch.Tensor, center: float
) -> torch.Tensor:
    """Return -log σ(r_c - r_r - m) + center (r_c + r_r)² of each pair, [N].

    The first term is the negative log-likelihood of the preferences (Bradley and Terry 1952; InstructGPT, arXiv:2203.02155, equation 1),
    with margins m as in Llama 2 (arXiv:2307.09288, equation 2). The second keeps scores near 0 (arXiv:2312.09244, section 2).

    Args:
        chosen_N, rejected_N: scores.
        margins_N: by how much the chosen answer should be ahead; 0: at all.
        center: weight of the second term.
    """
    return -logsigmoid(chosen_N - rejected_N - margins_N) + center * (chosen_N + rejected_N).square()
