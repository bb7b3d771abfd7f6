"""The contrast of a right hint with wrong ones modulates advantages token by token (arXiv:2606.11709)."""

from __future__ import annotations

import math

import pytest
import torch

from hpcrl.algorithms.distillation import contrastive_advantages, hint_contrasts, modulations

D = torch.float64
PAPER = {"scale": 0.5, "width": 0.02, "threshold": 0.02}
LENGTHS = torch.tensor([3, 5, 4])


def drawn(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return advantages, one per sample, contrasts of which some are small, and a mask."""
    draw = torch.Generator().manual_seed(seed)
    advantages = torch.randn(3, generator=draw, dtype=D).repeat_interleave(LENGTHS)
    contrasts = torch.randn(12, generator=draw, dtype=D) * 10 ** (-4 * torch.rand(12, generator=draw, dtype=D))
    return advantages, contrasts, (torch.rand(12, generator=draw) < 0.8).to(D)


def test_golden_contrast() -> None:
    """Probabilities of 0.6 against the mean of 0.1 and 0.3, or against 0.3 alone, or nothing."""
    right, wrong = torch.tensor([0.6, 0.6, 0.6], dtype=D), torch.tensor([[0.1, 0.0, 0.0], [0.3, 0.3, 0.0]], dtype=D)
    assert hint_contrasts(right.log(), wrong.log()).tolist() == pytest.approx([math.log(3), math.log(2), 0])


def test_what_every_hint_does_cancels() -> None:
    draw = torch.Generator().manual_seed(1)
    style, right, wrong = torch.randn(6, generator=draw), *torch.randn(2, 6, generator=draw)
    wrong_KP = torch.stack([wrong, wrong - 1, torch.full((6,), -torch.inf)])
    torch.testing.assert_close(hint_contrasts(right + style, wrong_KP + style), hint_contrasts(right, wrong_KP))
    assert not hint_contrasts(right, right.expand(4, 6)).any(), (
        "a hint that says what the right one says teaches nothing"
    )


def test_golden_advantages() -> None:
    """0.5 tanh(2) is added to the first token, -0.5 to the second; the third is within the threshold, the last is not trained."""
    contrasts, mask = torch.tensor([0.04, -3.0, 0.0007, 5.0], dtype=D), torch.tensor([1.0, 1, 1, 0], dtype=D)
    added = modulations(contrasts, mask, **PAPER)
    assert added.tolist() == pytest.approx([0.5 * math.tanh(2), -0.5, 0, 0])
    for advantage, expected in ((1.0, [1.4820138, 0.5, 1]), (-0.3, [0, -0.8, -0.3]), (0.0, [0, 0, 0])):
        found = contrastive_advantages(torch.full((4,), advantage, dtype=D), added, mask, torch.tensor([4]), weight=2.0)
        first, second, third = expected
        assert found.tolist() == pytest.approx([2 * 3 / 2 * first, 2 * 3 / 2 * second, 3 * third, advantage])


def test_rewards_decide_the_direction_and_each_set_has_a_mean_of_its_own() -> None:
    for seed in range(20):
        advantages, contrasts, mask = drawn(seed)
        added = modulations(contrasts, mask, **PAPER)
        assert added.abs().max() <= 0.5
        found = contrastive_advantages(advantages, added, mask, LENGTHS, weight=0.25)
        assert (found * advantages >= 0).all()
        assert torch.equal(found[mask == 0], advantages[mask == 0])
        factors = contrastive_advantages(torch.full_like(advantages, 1e9), added, mask, LENGTHS, weight=0.25) / 1e9
        for own, changed, trained in zip(*(one.split(LENGTHS.tolist()) for one in (factors, added, mask)), strict=True):
            for part, weight in ((changed != 0, 0.25), ((changed == 0) & (trained > 0), 1.0)):
                if part.any():
                    assert own[part].sum().item() == pytest.approx(weight * trained.sum().item())


def test_samples_do_not_depend_on_each_other() -> None:
    advantages, contrasts, mask = drawn(3)
    added = modulations(contrasts, mask, **PAPER)
    whole = contrastive_advantages(advantages, added, mask, LENGTHS, weight=1.0)
    parts = zip(*(one.split(LENGTHS.tolist()) for one in (advantages, added, mask)), strict=True)
    alone = [contrastive_advantages(*one, torch.tensor([len(one[0])]), weight=1.0) for one in parts]
    assert torch.equal(torch.cat(alone), whole)


def test_without_wrong_hints_rewards_alone_count() -> None:
    advantages, _, mask = drawn(5)
    none = hint_contrasts(torch.full((12,), -1.0), torch.full((4, 12), -torch.inf))
    found = contrastive_advantages(advantages, modulations(none, mask, **PAPER), mask, LENGTHS, weight=1.0)
    assert torch.equal(found, advantages)
