"""Estimators of the KL divergence from the policy to a reference, per sampled token.

With x drawn from the policy, each estimates KL(pi || ref) (J. Schulman, "Approximating KL Divergence",
http://joschu.net/blog/kl-approx.html).
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def k3(logprobs_P: torch.Tensor, ref_logprobs_P: torch.Tensor) -> torch.Tensor:
    """Return exp(d) - d - 1 with d = log ref - log pi: never negative, and with little variance.

    d is clamped to [-20, 20] and the value to [-10, 10]. The gradient flows through `logprobs_P`.
    """
    assert logprobs_P.shape == ref_logprobs_P.shape, f"{tuple(logprobs_P.shape)} and {tuple(ref_logprobs_P.shape)}"
    difference_P = (ref_logprobs_P - logprobs_P).clamp(-20.0, 20.0)
    return (difference_P.exp() - difference_P - 1.0).clamp(-10.0, 10.0)


KL_ESTIMATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"k3": k3}
