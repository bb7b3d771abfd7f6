"""Divergences from a teacher: against distributions of torch, by hand, and at the extremes."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Categorical, kl_divergence

from hpcrl.algorithms.distillation import drift_weights, jensen_shannon, teacher_advantages
from hpcrl.algorithms.kl import k1
from tests.golden.distillation import selected_logprobs

BETAS = [0.0, 0.1, 0.5, 0.9, 1.0]


def logprobs(seed: int, tokens: int = 5, vocabulary: int = 7) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, vocabulary, generator=generator, dtype=torch.float64).log_softmax(-1)


def test_selected_logprobs_are_those_of_the_distribution() -> None:
    logits = 3 * logprobs(0) + 5
    ids = torch.tensor([[0, 6, 2], [1, 1, 3], [5, 4, 0], [6, 5, 4], [2, 2, 2]])
    expected = Categorical(logits=logits).logits.gather(-1, ids)
    torch.testing.assert_close(selected_logprobs(logits, ids), expected)
    assert selected_logprobs(logits.bfloat16(), ids).dtype == torch.float32


@pytest.mark.parametrize("beta", BETAS)
def test_over_the_whole_vocabulary_it_is_the_divergence_of_distributions(beta: float) -> None:
    policy, teacher = (Categorical(logits=logprobs(seed)) for seed in (0, 1))
    mixture = Categorical(probs=(1 - beta) * policy.probs + beta * teacher.probs)
    expected = beta * kl_divergence(teacher, mixture) + (1 - beta) * kl_divergence(policy, mixture)
    if beta in (0, 1):
        expected = kl_divergence(teacher, policy) if beta == 0 else kl_divergence(policy, teacher)
    torch.testing.assert_close(jensen_shannon(policy.logits, teacher.logits, beta), expected)


@pytest.mark.parametrize("beta", [1e-6, 1 - 1e-6])
def test_the_limits_are_those_of_the_scaled_divergence(beta: float) -> None:
    policy, teacher = logprobs(0), logprobs(1)
    scaled = jensen_shannon(policy, teacher, beta) / min(beta, 1 - beta)
    torch.testing.assert_close(scaled, jensen_shannon(policy, teacher, round(beta)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("beta", BETAS)
def test_some_tokens_are_not_scaled_up_to_a_distribution(beta: float) -> None:
    policy, teacher = logprobs(0)[:, :3], logprobs(1)[:, :3]
    parts = sum(jensen_shannon(policy[:, [k]], teacher[:, [k]], beta) for k in range(3))
    torch.testing.assert_close(jensen_shannon(policy, teacher, beta), parts)


@pytest.mark.parametrize("beta", BETAS)
def test_gradients_are_those_of_the_value_and_vanish_at_the_teacher(beta: float) -> None:
    logits, teacher = logprobs(0).requires_grad_(), logprobs(1)

    def value(logits: torch.Tensor) -> torch.Tensor:
        return jensen_shannon(logits.log_softmax(-1), teacher, beta).sum()

    assert torch.autograd.gradcheck(value, (logits,), atol=1e-8)
    same = teacher.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(value(same), same)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("beta", BETAS)
def test_everything_is_finite(beta: float, dtype: torch.dtype) -> None:
    policy = torch.tensor([[0.0, -1e4], [-1e4, 0.0], [-1e4, -1e4], [0.0, 0.0]], dtype=dtype, requires_grad=True)
    teacher = torch.tensor([[-1e4, 0.0], [-1e4, 0.0], [0.0, -1e4], [0.0, -1e-3]], dtype=dtype)
    values = jensen_shannon(policy, teacher, beta)
    assert values.dtype == torch.float32
    assert values.isfinite().all()
    values.sum().backward()
    assert policy.grad is not None
    assert policy.grad.isfinite().all()
    assert jensen_shannon(policy[:0], teacher[:0], beta).shape == (0,)


def given() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:
    """Advantages, divergences and masks of three samples, the second of one token, the third without a trained one."""
    divergences = torch.tensor([9.0, 1.0, math.nan, 2.0, 4.0, 3.0, 5.0, 6.0], dtype=torch.float64)
    mask = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    return torch.full((8,), 0.5, dtype=torch.float64), divergences, mask, [5, 1, 2]


def test_a_divergence_is_a_penalty_on_its_own_token() -> None:
    found = teacher_advantages(*given(), kl_penalty_coef=2.0, kl_discount_factor=0.0)
    assert found.tolist() == [0.5, 0.5 - 2, 0.5, 0.5 - 4, 0.5 - 8, 0.5 - 6, 0.5, 0.5]


def test_later_tokens_of_the_sample_count_discounted() -> None:
    """Time passes with trained tokens only."""
    found = teacher_advantages(*given(), kl_penalty_coef=1.0, kl_discount_factor=0.5)
    assert found.tolist() == [0.5, 0.5 - (1 + 1 + 1), 0.5, 0.5 - (2 + 2), 0.5 - 4, 0.5 - 3, 0.5, 0.5]


@pytest.mark.parametrize("discount", [0.0, 0.7])
def test_samples_do_not_depend_on_what_they_are_packed_with(discount: float) -> None:
    advantages, divergences, mask, lengths = given()
    settings = {"kl_penalty_coef": 0.3, "kl_discount_factor": discount}
    whole = teacher_advantages(advantages, divergences, mask, lengths, **settings).split(lengths)
    parts = list(zip(*(values.split(lengths) for values in (advantages, divergences, mask)), strict=True))
    for number, part in enumerate(parts):
        torch.testing.assert_close(teacher_advantages(*part, [lengths[number]], **settings), whole[number])
    mixed = [torch.cat([parts[number][at] for number in (2, 0, 1)]) for at in range(3)]
    found = teacher_advantages(mixed[0], mixed[1], mixed[2], [2, 5, 1], **settings).split([2, 5, 1])
    torch.testing.assert_close(found, (whole[2], whole[0], whole[1]))
    empty = torch.zeros(0, dtype=torch.float64)
    assert teacher_advantages(empty, empty, empty, [], **settings).shape == (0,)


def test_a_loss_of_these_advantages_is_least_at_the_teacher() -> None:
    """-A log pi over many samples of the policy, with the reverse KL divergence: the score of the divergence's gradient."""
    torch.manual_seed(0)
    teacher, logits = logprobs(1)[0], logprobs(0)[0].clone().requires_grad_()
    policy = logits.log_softmax(-1)
    draws = Categorical(logits=policy.detach()).sample((200_000,))
    chosen, mask = policy[draws], torch.ones(len(draws), dtype=torch.float64)
    divergences = k1(chosen.detach(), teacher[draws])
    settings = {"kl_penalty_coef": 1.0, "kl_discount_factor": 0.0}
    advantages = teacher_advantages(torch.zeros_like(mask), divergences, mask, [1] * len(draws), **settings)
    (found,) = torch.autograd.grad(-(advantages * chosen).mean(), logits)
    value = kl_divergence(Categorical(logits=logits), Categorical(logits=teacher))
    (expected,) = torch.autograd.grad(value, logits)
    torch.testing.assert_close(found, expected, atol=5e-3, rtol=0)
    assert expected.abs().max() > 0.05


def test_a_token_counts_by_the_divergence_that_is_still_to_come() -> None:
    """By hand: of 1 + 2 + 3 nats, 0, 1 and 3 came before; the second sample is one token, the third has none that is trained."""
    divergences = torch.tensor([-1.0, 9.0, 2.0, -3.0, 4.0, 5.0])
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0, 0.0])
    found = drift_weights(divergences, mask, torch.tensor([4, 1, 1]), 0.5)
    assert found[mask > 0].tolist() == pytest.approx([1.5, 1.5 - 0.5 / 6, 1.5 - 0.5 * 3 / 6, 1.5])
    assert found.isfinite().all()


def test_weights_of_drift_fall_within_a_sample_and_do_not_depend_on_the_others() -> None:
    generator, lengths = torch.Generator().manual_seed(4), [7, 1, 30]
    divergences, mask = torch.randn(38, generator=generator), (torch.rand(38, generator=generator) > 0.2).float()
    together = drift_weights(divergences, mask, torch.tensor(lengths), 0.5).split(lengths)
    alone = zip(divergences.split(lengths), mask.split(lengths), strict=True)
    for whole, (own, own_mask) in zip(together, alone, strict=True):
        torch.testing.assert_close(drift_weights(own, own_mask, torch.tensor([len(own)]), 0.5), whole)
        assert (whole.diff() <= 1e-6).all()
        assert whole.min() >= 1
        assert whole.max() <= 1.5
    assert (drift_weights(divergences, mask, torch.tensor(lengths), 0.0) == 1).all()
    torch.testing.assert_close(drift_weights(1e6 * divergences, mask, torch.tensor(lengths), 0.5), torch.cat(together))
