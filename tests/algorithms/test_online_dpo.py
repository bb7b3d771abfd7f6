"""The best and the worst sample of a group are a pair of DPO: by hand, and its gradient by finite differences."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hpcrl.algorithms.advantages import ESTIMATORS, AdvantageInputs
from hpcrl.algorithms.settings import configured
from hpcrl.config import AlgorithmConfig

STEP = 1e-6


def estimate(rewards: list[float], penalties: torch.Tensor, groups: list[int], beta: float, **more: Any) -> list[float]:
    earned = torch.tensor(rewards, dtype=torch.float64)
    given = AdvantageInputs(
        rewards_P=earned - penalties,
        mask_P=torch.full((len(rewards),), 3.0, dtype=torch.float64),
        lengths=[1] * len(rewards),
        groups_B=torch.tensor(groups),
        earned_P=earned,
        **more,
    )
    settings = AlgorithmConfig(advantage_estimator="online_dpo", kl_loss_coef=beta)
    return configured("advantage_estimator", "online_dpo", ESTIMATORS, settings)(given).tolist()


def test_golden_values() -> None:
    """beta 0.5, beta (c - r) of 0.3 + 0.1 and of -2.0: weights 0.5 / (1 + e^0.4) and 0.5 / (1 + e^-2)."""
    penalties = torch.tensor([0.3, 9.0, -0.1, 1.0, 3.0, 5.0, 5.0], dtype=torch.float64)
    found = estimate([2.0, 1.0, 0.0, 1.0, -1.0, 4.0, 4.0], penalties, [0, 0, 0, 1, 1, 2, 2], 0.5)
    first, second = 0.5 / (1 + math.exp(0.4)), 0.5 / (1 + math.exp(-2.0))
    assert found == pytest.approx([first, 0, -first, second, -second, 0, 0])
    failed = estimate([2.0, 1.0, 0.0], penalties[:3], [0, 0, 0], 0.5, scored_B=torch.tensor([1.0, 1.0, 0.0]).double())
    assert failed[2] == 0, "a sample that failed is no pair's worse answer"
    assert failed[0] == -failed[1] > 0


def test_groups_of_equal_rewards_are_no_pairs_whatever_their_penalties() -> None:
    draw = torch.Generator().manual_seed(0)
    for _ in range(50):
        assert not any(estimate([1.0] * 4, torch.randn(4, generator=draw, dtype=torch.float64), [0] * 4, 0.1))


def test_its_policy_gradient_is_that_of_dpo() -> None:
    """Answers of three tokens of a policy of seven, two groups of three answers; finite differences of the loss of the pairs."""
    draw, beta, rewards = torch.Generator().manual_seed(1), 0.7, [0.1, 0.9, 0.4, 3.0, -1.0, 2.0]
    answers = torch.randint(0, 7, (6, 3), generator=draw)
    reference = torch.randn(6, generator=draw, dtype=torch.float64)
    logits = torch.randn(3, 7, generator=draw, dtype=torch.float64, requires_grad=True)

    def logprobs(logits: torch.Tensor) -> torch.Tensor:
        return logits.log_softmax(-1)[torch.arange(3), answers].sum(1)

    def loss(logits: torch.Tensor) -> float:
        c = (logprobs(logits) - reference).tolist()
        return sum(math.log1p(math.exp(-beta * (c[best] - c[worst]))) for best, worst in ((1, 0), (3, 4)))

    penalties = beta * (logprobs(logits) - reference).detach()
    weights = torch.tensor(estimate(rewards, penalties, [0, 0, 0, 1, 1, 1], beta), dtype=torch.float64)
    (gradient,) = torch.autograd.grad(-(weights * logprobs(logits)).sum(), logits)
    moved = STEP * torch.eye(21, dtype=torch.float64).view(21, 3, 7)
    expected = [(loss(logits.detach() + one) - loss(logits.detach() - one)) / (2 * STEP) for one in moved]
    assert gradient.flatten().tolist() == pytest.approx(expected, abs=1e-8)
    assert max(map(abs, expected)) > 0.1
