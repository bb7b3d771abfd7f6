"""Losses and masks for samples of another policy than the one that is updated: vespo, dro, m2po, KPop's mask, estimated old log-probabilities."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.distributions import Bernoulli, kl_divergence

from hpcrl.algorithms.losses import LossTokens, dro, gpg, importance_sampling, m2po, vespo
from hpcrl.algorithms.off_policy import correct, proximal_logprobs
from hpcrl.config import AlgorithmConfig
from hpcrl.config.validate import build
from hpcrl.trainer.loss import build_objective
from tests.algorithms.material import make_samples, micro_batch, tokens_of

VESPO = {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}
ON_POLICY = make_samples(spread=0.0)
STALE = make_samples(spread=0.5)


def gradient(loss_P: torch.Tensor, tokens: LossTokens, leaf: torch.Tensor) -> torch.Tensor:
    (found,) = torch.autograd.grad((loss_P * tokens.mask).sum(), leaf)
    return found


def with_leaf(tokens: LossTokens) -> tuple[LossTokens, torch.Tensor]:
    leaf = tokens.logprobs.clone().requires_grad_()
    return replace(tokens, logprobs=leaf), leaf


def row(*differences: float, advantages: list[float], lengths: list[int] | None = None) -> LossTokens:
    """Return tokens of these differences of log-probabilities from the rollout."""
    rollout = torch.full((len(differences),), -2.0, dtype=torch.float64)
    logprobs = rollout + torch.tensor(differences, dtype=torch.float64)
    ones, given = torch.ones_like(rollout), torch.tensor(advantages, dtype=torch.float64)
    return LossTokens(logprobs, logprobs, rollout, given, ones, torch.tensor(lengths or [len(differences)]))


@pytest.mark.parametrize("name", ["vespo", "dro", "m2po"])
def test_on_the_samples_of_the_policy_itself_the_gradient_is_that_of_reinforce(name: str) -> None:
    losses = {
        "vespo": lambda tokens: vespo(tokens, **VESPO),
        "dro": lambda tokens: dro(tokens, beta=0.7),
        "m2po": lambda tokens: m2po(tokens, threshold=0.04),
    }
    tokens, leaf = with_leaf(tokens_of(ON_POLICY))
    expected = gradient(gpg(tokens)[0], tokens, leaf)
    torch.testing.assert_close(gradient(losses[name](tokens)[0], tokens, leaf), expected)


@pytest.mark.parametrize(("advantage", "k", "rate"), [(1.0, 2.0, 3.0), (-1.0, 3.0, 2.0)])
def test_vespo_weighs_by_the_product_of_a_samples_ratios(advantage: float, k: float, rate: float) -> None:
    """The formula of the paper with its settings; greatest at the ratio k / rate, nothing far away on either side."""
    weights = dict[float, float]()
    for log_ratio in (-9.0, -1.0, math.log(k / rate), 0.0, 1.0, 9.0):
        tokens = row(log_ratio / 4, log_ratio * 3 / 4, 0.3, advantages=[advantage] * 3, lengths=[2, 1])
        loss, sums = vespo(tokens, **VESPO)
        weight = (-loss / (tokens.advantages * tokens.logprobs))[0].item()
        assert weight == pytest.approx(math.exp(log_ratio) ** k * math.exp(rate * (1 - math.exp(log_ratio))), abs=1e-12)
        torch.testing.assert_close(loss[1] * tokens.logprobs[0], loss[0] * tokens.logprobs[1])
        other = math.exp(0.3 * k + rate * (1 - math.exp(0.3)))
        assert sums["sample_weight"].item() == pytest.approx(2 * weight + other)
        weights[log_ratio] = weight
    assert weights[0.0] == 1
    assert max(weights, key=weights.__getitem__) == math.log(k / rate)
    assert weights[9.0] == pytest.approx(0, abs=1e-12)
    assert weights[-9.0] < 1e-6


def test_vespo_does_not_count_masked_tokens() -> None:
    tokens = tokens_of(STALE)
    moved = replace(tokens, rollout_logprobs=torch.where(tokens.mask > 0, tokens.rollout_logprobs, -9.0))
    kept = tokens.mask > 0
    torch.testing.assert_close(vespo(moved, **VESPO)[0][kept], vespo(tokens, **VESPO)[0][kept])


def test_dro_is_a_regression_of_the_log_ratio_on_the_advantage() -> None:
    """Its least value lies where beta times the log-ratio is the advantage, and it pulls there from both sides."""
    beta, advantage = 0.5, 0.8
    rows = [advantage / beta + shift for shift in (-1.0, 0.0, 1.0)]
    tokens, leaf = with_leaf(row(*rows, advantages=[advantage] * 3))
    loss, sums = dro(tokens, beta=beta)
    slopes = gradient(loss, tokens, leaf)
    assert slopes[1].item() == pytest.approx(0, abs=1e-12)
    assert slopes[0] < 0 < slopes[2]
    expected = [beta / 2 * x**2 - advantage * (x - 2) for x in rows]
    torch.testing.assert_close(loss.detach(), torch.tensor(expected, dtype=torch.float64))
    assert sums["squared_log_ratio"].item() == pytest.approx(sum(x**2 for x in rows))
    torch.testing.assert_close(dro(tokens, beta=0.0)[0], gpg(tokens)[0])


def test_m2po_leaves_out_as_few_of_the_farthest_tokens_as_it_can() -> None:
    # squares 0.01, 0.04, 0.09 and 1 of tokens that move away; their means are 0.01, 0.025, 0.0467 and 0.285
    differences, advantages = [0.1, -0.2, 1.0, 0.3, -3.0, 3.0, 0.9], [1.0, -1.0, 1.0, 1.0, 1.0, -1.0, 0.0]
    tokens = row(*differences, advantages=advantages)
    for threshold, left_out in ((0.3, []), (0.05, [2]), (0.0466, [2, 3]), (0.005, [0, 1, 2, 3])):
        leaf_tokens, leaf = with_leaf(tokens)
        loss, sums = m2po(leaf_tokens, threshold=threshold)
        expected = importance_sampling(replace(tokens, old_logprobs=tokens.rollout_logprobs))[0].clone()
        expected[left_out] = 0
        torch.testing.assert_close(loss.detach(), expected)
        torch.testing.assert_close(gradient(loss, leaf_tokens, leaf), expected)
        assert sums["clip_ratio"].item() == len(left_out)


def test_m2po_keeps_its_promise_and_ignores_what_is_masked() -> None:
    tokens = tokens_of(STALE)
    loss, _ = m2po(tokens, threshold=0.1)
    log_ratio = tokens.logprobs - tokens.rollout_logprobs
    pushed = (tokens.mask > 0) & (tokens.advantages * log_ratio > 0)
    kept, out = pushed & (loss != 0), pushed & (loss == 0)
    assert out.any()
    assert log_ratio[kept].square().mean() <= 0.1
    assert log_ratio[out].abs().min() >= log_ratio[kept].abs().max()
    moved = replace(tokens, rollout_logprobs=torch.where(tokens.mask > 0, tokens.rollout_logprobs, -30.0))
    torch.testing.assert_close((m2po(moved, threshold=0.1)[0] * tokens.mask), loss * tokens.mask)


@pytest.mark.parametrize(("old", "rollout"), [(0.9, 0.6), (0.6, 0.9), (0.02, 0.001), (0.001, 0.02), (0.5, 0.5)])
def test_a_divergence_in_either_direction_leaves_a_token_out(old: float, rollout: float) -> None:
    one, other = (Bernoulli(torch.tensor(p, dtype=torch.float64)) for p in (old, rollout))
    largest = max(kl_divergence(one, other).item(), kl_divergence(other, one).item())
    logprobs = torch.tensor([old, rollout], dtype=torch.float64).log()
    zero, mask = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    tokens = LossTokens(zero, logprobs[:1], logprobs[1:], zero, mask, torch.tensor([1]))
    for bound, kept in ((largest * (1 + 1e-6) + 1e-9, True), (largest * (1 - 1e-6), largest == 0)):
        found = correct(
            tokens,
            build(AlgorithmConfig, {"off_policy_correction": {"token_mask_kl_threshold": bound}}).off_policy_correction,
        )
        assert bool(found.mask.item()) is kept
        assert found.sums["token_mask_kl_ratio"].item() == (not kept)


def test_estimated_old_logprobs_lie_between_rollout_and_policy() -> None:
    policy, rollout = torch.tensor([-1.0, -1.0, -1.0, -4.0]), torch.tensor([-2.0, -2.0, -2.0, -2.0])
    found = proximal_logprobs(policy, rollout, torch.tensor([0.0, 1.0, 3.0, 1.0]))
    assert found.tolist() == pytest.approx([-2.0, -1.5, -1.25, -3.0])
    # a policy that moves by the same in each step: 0 at the version that chose the token, 4 after the update that is made
    steps = torch.arange(5.0)
    assert proximal_logprobs(-5 + steps[4:], -5 + steps[:1], torch.tensor([3.0])).item() == -5 + steps[3]


def test_an_objective_estimates_where_there_are_ages_and_no_old_logprobs() -> None:
    samples, weights = STALE, [0.1] * len(STALE)
    algorithm = build(AlgorithmConfig, {"use_kl_loss": False, "off_policy_correction": {"tis_ratio_type": "token"}})
    objective, batch = build_objective(algorithm), micro_batch(samples, weights, [0.0] * len(samples))
    logprobs, entropies = torch.cat([s.logprobs for s in samples]), torch.cat([s.entropies for s in samples])
    ages = torch.arange(len(logprobs)) % 3
    estimate = proximal_logprobs(logprobs, batch.rollout_logprobs, ages)
    given, _ = objective(replace(batch, old_logprobs=estimate), logprobs, entropies)
    found, sums = objective(replace(batch, old_logprobs=None, staleness=ages), logprobs, entropies)
    assert found == given
    itself, _ = objective(replace(batch, old_logprobs=None), logprobs, entropies)
    assert found != itself
    ratio = (logprobs - estimate).exp()
    assert sums["loss_metrics/ratio"] == pytest.approx((ratio * batch.loss_mask).sum().item())
