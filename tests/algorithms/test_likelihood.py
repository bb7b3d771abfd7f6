"""Losses of supervised fine-tuning: by hand, and against finite differences."""

from __future__ import annotations

import math

import pytest
import torch

from hpcrl.algorithms.likelihood import dft, nll


def test_dft_is_the_cross_entropy_times_the_probability() -> None:
    probabilities = [0.9, 0.5, 0.01, 1.0]
    logprobs_P = torch.tensor(probabilities, dtype=torch.float64).log().requires_grad_()
    loss_P = dft(logprobs_P)
    assert loss_P.tolist() == pytest.approx([-p * math.log(p) for p in probabilities], rel=1e-12)
    loss_P.sum().backward()
    assert logprobs_P.grad is not None
    assert logprobs_P.grad.tolist() == pytest.approx([-p for p in probabilities], rel=1e-12)


def test_dft_goes_where_the_probability_itself_rises_fastest() -> None:
    """Its gradient is that of minus the sum of the probabilities: the improbable token, which nll weighs like others, counts little."""
    logits_PV = torch.tensor([[0.1, 2.0, -1.0], [3.0, 0.0, -4.0]], dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([[1], [2]])

    def probability(logits_PV: torch.Tensor) -> torch.Tensor:
        return -logits_PV.softmax(-1).gather(1, labels).sum()

    assert torch.autograd.gradcheck(probability, (logits_PV,), eps=1e-6, atol=1e-8)
    (found,) = torch.autograd.grad(dft(logits_PV.log_softmax(-1).gather(1, labels)).sum(), logits_PV)
    (expected,) = torch.autograd.grad(probability(logits_PV), logits_PV)
    torch.testing.assert_close(found, expected)
    (plain,) = torch.autograd.grad(nll(logits_PV.log_softmax(-1).gather(1, labels)).sum(), logits_PV)
    assert found[1].norm() < 1e-2 * plain[1].norm()
