"""Estimators of the KL divergence from the policy to a reference, per sampled token.

With x drawn from the policy, each estimates KL(pi || ref) (J. Schulman, "Approximating KL Divergence",
http://joschu.net/blog/kl-approx.html); d = log pi - log ref. The gradient flows through the policy's log-probabilities.

Tokens of an older policy estimate it with the weight r = pi / pi_old, whose gradient counts too. So the gradient of the estimate is that
of the divergence (DeepSeek-V3.2, arXiv:2512.02556).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hpcrl.algorithms.losses import widened

KlEstimator = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | float], torch.Tensor]
"""(log-probabilities [P], those of the reference [P], weights [P] or 1.0) -> divergence [P]."""


def k1(logprobs_P: torch.Tensor, ref_logprobs_P: torch.Tensor, ratio_P: torch.Tensor | float = 1.0) -> torch.Tensor:
    """Return d, unbiased and of either sign.

    The plain estimate (Schulman, http://joschu.net/blog/kl-approx.html).

    Formula:
        d
    Use:
        in the reward (`use_kl_in_reward`); as a loss its expected gradient on samples of the policy is 0
    """
    return _difference(logprobs_P, ref_logprobs_P) * ratio_P


def k2(logprobs_P: torch.Tensor, ref_logprobs_P: torch.Tensor, ratio_P: torch.Tensor | float = 1.0) -> torch.Tensor:
    """Return d^2 / 2, never negative.

    Its gradient on samples of the policy is that of the divergence (Schulman, http://joschu.net/blog/kl-approx.html).

    Formula:
        d² / 2
    Use:
        in the loss (`use_kl_loss`): its gradient is that of the divergence
    """
    return _difference(logprobs_P, ref_logprobs_P).square() / 2 * ratio_P


def k3(logprobs_P: torch.Tensor, ref_logprobs_P: torch.Tensor, ratio_P: torch.Tensor | float = 1.0) -> torch.Tensor:
    """Return exp(-d) - 1 + d, never negative and with little variance.

    The estimate with a control variate (Schulman, http://joschu.net/blog/kl-approx.html).

    d is clamped to [-20, 20] and the value, times the weight, to [-10, 10].

    Formula:
        exp(-d) - 1 + d, with d clamped to ±20 and the value to ±10
    Use:
        the usual choice in the loss (`use_kl_loss`): never negative, little variance
    """
    difference_P = (-_difference(logprobs_P, ref_logprobs_P)).clamp(-20.0, 20.0)
    return ((difference_P.exp() - difference_P - 1.0) * ratio_P).clamp(-10.0, 10.0)


def absolute(
    logprobs_P: torch.Tensor, ref_logprobs_P: torch.Tensor, ratio_P: torch.Tensor | float = 1.0
) -> torch.Tensor:
    """Return |d|.

    Formula:
        abs(d)
    Use:
        a constant pull towards the reference in the loss (`use_kl_loss`), however far
    """
    return _difference(logprobs_P, ref_logprobs_P).abs() * ratio_P


def _difference(logprobs_P: torch.Tensor, ref_logprobs_P: torch.Tensor) -> torch.Tensor:
    assert logprobs_P.shape == ref_logprobs_P.shape, f"{tuple(logprobs_P.shape)} and {tuple(ref_logprobs_P.shape)}"
    return widened(logprobs_P) - widened(ref_logprobs_P)


def adapted(coefficient: float, divergence: float, samples: float, target: float, horizon: float) -> float:
    """Return the coefficient after a batch: larger where the divergence was above its target (arXiv:1909.08593, section 2.2).

    coefficient (1 + clip(divergence / target - 1, -0.2, 0.2) min(samples / horizon, 1))

    It keeps its sign: the paper's batches are smaller than its horizon, and what follows beyond is a factor below 0.

    Args:
        divergence: mean of the batch, in nats per token.
        horizon: in samples.
    """
    error = min(max(divergence / target - 1.0, -0.2), 0.2)
    return coefficient * (1.0 + error * min(samples / horizon, 1.0))


KL_ESTIMATORS: dict[str, KlEstimator] = {"k1": k1, "k2": k2, "k3": k3, "abs": absolute}
