"""Losses that no other framework's cases cover, by hand and against their papers' formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Bernoulli, kl_divergence

from hpcrl.algorithms.losses import LossTokens, clipped_surrogate, dppo, gpg
from hpcrl.algorithms.reductions import Reduction
from hpcrl.config import AlgorithmConfig
from hpcrl.config.validate import build
from hpcrl.trainer.loss import build_policy_loss
from tests.algorithms.material import make_samples, run, tokens_of

TV = {"dppo_type": "binary_tv", "delta_low": 0.2, "delta_high": 0.2}


def one_token(probability: float, rollout: float, advantage: float) -> LossTokens:
    logprobs, old, given = torch.tensor([[math.log(probability)], [-50.0], [math.log(rollout)]], dtype=torch.float64)
    advantages = torch.tensor([advantage], dtype=torch.float64)
    return LossTokens(
        logprobs.requires_grad_(), old, given, advantages, torch.ones(1, dtype=torch.float64), torch.tensor([1])
    )


@pytest.mark.parametrize(
    ("probability", "rollout", "advantage", "counts"),
    [
        (0.75, 0.5, 1.0, False),
        (0.75, 0.5, -1.0, True),  # on the way back
        (0.69, 0.5, 1.0, True),
        (1e-2, 1e-4, 1.0, True),  # a ratio of 100, and still rare
        (0.75, 0.99, -1.0, False),  # a ratio that PPO does not clip
        (0.75, 0.99, 1.0, True),
        (0.5, 0.5, 1.0, True),
        (0.75, 0.5, 0.0, True),
    ],
)
def test_dppo_bounds_the_difference_of_probabilities(
    probability: float, rollout: float, advantage: float, counts: bool
) -> None:
    tokens = one_token(probability, rollout, advantage)
    loss, sums = dppo(tokens, **TV)
    expected = -probability / rollout * advantage if counts else 0.0
    assert loss.item() == pytest.approx(expected)
    loss.backward()
    assert tokens.logprobs.grad is not None
    assert tokens.logprobs.grad.item() == pytest.approx(expected)
    assert sums["clip_ratio"].item() == (not counts)


@pytest.mark.parametrize(
    ("probability", "advantage", "counts"),
    [
        *((risen, advantage, risen == 0.69) for risen in (0.69, 0.75) for advantage in (1.0, -1.0)),
        *((fallen, advantage, fallen == 0.25) for fallen in (0.25, 0.15) for advantage in (1.0, -1.0)),
    ],
)
def test_two_sided_dppo_bounds_tokens_of_any_advantage(probability: float, advantage: float, counts: bool) -> None:
    tokens = one_token(probability, 0.5, advantage)
    loss, sums = dppo(tokens, **{**TV, "delta_low": 0.3}, two_sided=True)
    assert loss.item() == pytest.approx(-probability / 0.5 * advantage if counts else 0.0)
    loss.backward()
    assert tokens.logprobs.grad is not None
    assert tokens.logprobs.grad.item() == pytest.approx(loss.item())
    assert sums["clip_ratio"].item() == (not counts)


@pytest.mark.parametrize(("probability", "advantage"), [(0.9, 1.0), (0.3, -1.0)])
def test_dppo_by_kl_divergence(probability: float, advantage: float) -> None:
    rollout, policy = (Bernoulli(torch.tensor(p, dtype=torch.float64)) for p in (0.6, probability))
    divergence = kl_divergence(rollout, policy).item()
    tokens = one_token(probability, 0.6, advantage)
    wide, narrow = divergence * (1 + 1e-6), divergence * (1 - 1e-6)
    side = "delta_high" if advantage > 0 else "delta_low"
    for delta, counts in ((wide, True), (narrow, False)):
        deltas = {"delta_low": 9.0, "delta_high": 9.0} | {side: delta}
        assert bool(dppo(tokens, dppo_type="binary_kl", **deltas)[0].item()) is counts


def test_dppo_draws_every_token_to_the_rollout_by_kl_tau() -> None:
    for token in (one_token(0.5, 0.4, 1.0), one_token(0.9, 0.3, 1.0)):  # inside the trust region, and outside
        squared = (token.logprobs - token.rollout_logprobs).square()
        penalty = dppo(token, **TV, kl_tau=0.01)[0] - dppo(token, **TV)[0]
        torch.testing.assert_close(penalty, 0.01 * squared)


@pytest.mark.parametrize("dppo_type", ["binary_tv", "binary_kl"])
def test_dppo_of_a_token_that_became_certain_or_impossible(dppo_type: str) -> None:
    for probability, rollout, advantage in ((1.0, 0.5, 1.0), (1e-30, 0.5, -1.0), (0.5, 1.0, -1.0)):
        loss, _ = dppo(one_token(probability, rollout, advantage), **{**TV, "dppo_type": dppo_type})
        assert loss.item() == 0
    loss, _ = dppo(one_token(1.0, 1.0, 1.0), **{**TV, "dppo_type": dppo_type})
    assert loss.item() == -1


def test_gpg_is_the_gradient_of_a_policy_that_sampled_the_tokens_itself() -> None:
    samples = make_samples(spread=0.0)
    leaf, other = (tokens_of(samples).logprobs.clone().requires_grad_() for _ in range(2))
    loss, sums = gpg(tokens_of(samples, leaf))
    assert sums == {}
    loss.sum().backward()
    clipped_surrogate(tokens_of(samples, other), eps_clip_low=0.2, eps_clip_high=0.2)[0].sum().backward()
    torch.testing.assert_close(leaf.grad, other.grad)


def test_gmpo_is_the_mean_over_samples_of_products_of_ratios() -> None:
    """The formula of the paper, of clipped ratios to the power of 1 / tokens, and its gradient."""
    samples = make_samples(spread=0.6)
    algorithm = {"policy_loss_type": "gmpo", "use_kl_loss": False, "gmpo": {"log_clip_low": 0.3, "log_clip_high": 0.2}}
    found, gradients = run(samples, algorithm, Reduction("sequence_mean"), [[0, 1, 2], [3, 4, 5]])
    leaves = [sample.logprobs.clone().requires_grad_() for sample in samples]
    terms, clipped = [], 0
    for sample, leaf in zip(samples, leaves, strict=True):
        kept, advantage = sample.mask > 0, sample.advantages[0]
        ratio = (leaf - sample.old_logprobs).exp()[kept]
        bounded = ratio.clamp(max=math.exp(0.2)) if advantage > 0 else ratio.clamp(min=math.exp(-0.3))
        clipped += int((bounded != ratio).sum())
        terms.append(-advantage * (bounded.prod() ** (1 / int(kept.sum())) if kept.any() else 0.0))
    expected = torch.stack(terms).mean()
    expected.backward()
    torch.testing.assert_close(found, expected.detach())
    for gradient, leaf in zip(gradients, leaves, strict=True):
        torch.testing.assert_close(gradient, torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
    assert clipped > 3
    sums = build_policy_loss(build(AlgorithmConfig, algorithm))(tokens_of(samples))[1]
    assert sums["clip_ratio"].item() == clipped
