"""How the rewards of a group become advantages.

An estimator sees one group at a time: rewards [n], one number per sample, to advantages [n]. Every token of a sample carries
the advantage of its sample.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_EPSILON = 1e-6


def grpo(rewards_n: torch.Tensor, norm_by_std: bool = True) -> torch.Tensor:
    """Return how much better each sample is than its group (DeepSeekMath, arXiv:2402.03300, section 4.1.2).

    (r - mean) / (std + 1e-6) with the unbiased standard deviation, or r - mean (Dr. GRPO, arXiv:2503.20783). A group whose
    rewards are all equal teaches nothing: 0. A group of one has nothing to compare with: mean 0 and std 1.

    Args:
        rewards_n: [n], any floating type.

    Returns:
        [n] float32.
    """
    assert rewards_n.ndim == 1, f"rewards of one group are [n], not {tuple(rewards_n.shape)}"
    rewards_n = rewards_n.double()  # in float32 the mean of equal rewards can miss them, and the tiny std blows that up
    alone = len(rewards_n) == 1
    centered_n = rewards_n if alone else rewards_n - rewards_n.mean()
    if norm_by_std:
        centered_n = centered_n / ((1.0 if alone else rewards_n.std()) + _EPSILON)
    return centered_n.float()


ADVANTAGES: dict[str, Callable[..., torch.Tensor]] = {"grpo": grpo}
