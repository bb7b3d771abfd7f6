"""What the algorithms promise beyond the numbers of others."""

from __future__ import annotations

import pytest
import torch

from hpcrl.algorithms.advantages import grpo
from hpcrl.algorithms.kl import k3
from hpcrl.algorithms.losses import clipped_surrogate, masked_sum


@pytest.mark.parametrize("norm_by_std", [True, False])
def test_equal_rewards_teach_nothing(norm_by_std: bool) -> None:
    assert grpo(torch.full((7,), 0.1), norm_by_std=norm_by_std).abs().max() < 1e-6


def test_one_sample_keeps_its_reward() -> None:
    torch.testing.assert_close(grpo(torch.tensor([0.7])), torch.tensor([0.7]), atol=1e-6, rtol=0)


def test_at_the_old_policy_the_gradient_is_the_advantage() -> None:
    logprobs = torch.randn(9, requires_grad=True)
    advantages, mask = torch.randn(9), torch.ones(9)
    loss, metrics = clipped_surrogate(
        logprobs, logprobs.detach(), advantages, mask, eps_clip_low=0.2, eps_clip_high=0.2
    )
    loss.sum().backward()
    torch.testing.assert_close(logprobs.grad, -advantages)
    assert metrics["clip_ratio"] == 0


def test_nan_outside_the_mask_does_no_harm() -> None:
    assert masked_sum(torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 0.0])) == 1.0


def test_kl_pulls_towards_the_reference() -> None:
    logprobs = torch.tensor([-1.0, -3.0], requires_grad=True)
    k3(logprobs, torch.tensor([-2.0, -2.0])).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad[0] > 0 > logprobs.grad[1]


def test_shapes_are_checked() -> None:
    with pytest.raises(AssertionError, match="one shape"):
        clipped_surrogate(
            torch.zeros(2), torch.zeros(2), torch.zeros(2, 1), torch.ones(2), eps_clip_low=0, eps_clip_high=0
        )
