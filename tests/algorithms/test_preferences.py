"""Losses of pairs have one name everywhere, and take samples laid end to end in pairs. Their values are compared with TRL's in tests/trainer/backends."""

from __future__ import annotations

import math
import re

import pytest
import torch

from hpcrl.algorithms.preferences import (
    LIKELIHOOD,
    PAIR_LOSSES,
    Pairs,
    loss_weights,
    pair_loss,
    pair_metrics,
    unpaired_loss,
)
from hpcrl.config.sections.dpo import PREFERENCE_LOSSES, UNPAIRED_LOSSES, DPOConfig
from tests.golden.trl_dpo import LOSSES
from tests.paths import ROOT


def test_names_are_those_of_the_settings_and_of_the_page() -> None:
    page = (
        (ROOT / "docs" / "learning_from_datasets.md")
        .read_text()
        .partition("| name | loss of a pair |")[2]
        .partition("\n\n")[0]
    )
    documented = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert [*PAIR_LOSSES, LIKELIHOOD, *UNPAIRED_LOSSES] == list(PREFERENCE_LOSSES) == documented
    assert [name for name in PREFERENCE_LOSSES if name not in ("simpo", "orpo", *UNPAIRED_LOSSES)] == list(LOSSES)


def test_a_loss_that_is_named_twice_has_both_weights() -> None:
    dpo = DPOConfig(loss_type=["sigmoid", "sft", "sigmoid"], loss_weights=[0.5, 2.0, 0.25])
    assert loss_weights(dpo) == {"sigmoid": 0.75, "sft": 2.0}
    assert loss_weights(DPOConfig()) == {"sigmoid": 1.0}


def test_samples_laid_end_to_end_are_pairs() -> None:
    logprobs_P = -torch.arange(1.0, 11.0).requires_grad_()
    mask_P = torch.tensor([0.0, 1, 1, 1, 0, 0, 0, 1, 0, 1])
    ref_P = torch.full((10,), -1.0)
    pairs = Pairs.of(logprobs_P, ref_P, mask_P, torch.tensor([3, 2, 3, 2]))
    assert pairs.chosen.tolist() == [-5.0, -8.0]
    assert pairs.rejected.tolist() == [-4.0, -10.0]
    assert pairs.ref_chosen.tolist() == [-2.0, -1.0]
    assert (pairs.chosen_tokens.tolist(), pairs.rejected_tokens.tolist()) == ([2.0, 1.0], [1.0, 1.0])
    assert pairs.margin.tolist() == [-3.0 + 3.0, -7.0 + 9.0]
    free = Pairs.of(logprobs_P, None, mask_P, torch.tensor([3, 2, 3, 2]))
    assert free.margin.tolist() == [-1.0, 2.0]


def test_a_rank_without_pairs_has_a_loss_of_nothing_that_can_be_differentiated() -> None:
    logprobs_P = torch.tensor([-1.0]).requires_grad_()
    pairs = Pairs.of(logprobs_P, None, torch.zeros(1), torch.tensor([1]))
    loss = pair_loss(pairs, DPOConfig(loss_type=list(PAIR_LOSSES))).sum()
    assert len(pairs.chosen) == 0
    loss.backward()
    assert (loss.item(), logprobs_P.grad.tolist()) == (0.0, [0.0])


CHOSEN, REJECTED = [0.9, 0.5, 0.8], [0.25, 0.64]  # probabilities of the tokens of a pair
FREE = DPOConfig(loss_type=["simpo"], beta=2.0, simpo_gamma=0.6)


def pair_of(chosen: list[float], rejected: list[float]) -> Pairs:
    """Return one pair of answers whose tokens have these probabilities, in float64; the reference is far away."""
    logprobs_P = torch.tensor([*chosen, *rejected], dtype=torch.float64).log()
    lengths_B = torch.tensor([len(chosen), len(rejected)])
    return Pairs.of(logprobs_P, torch.full_like(logprobs_P, -7.0), torch.ones_like(logprobs_P), lengths_B)


def test_simpo_is_the_chance_that_the_better_answer_is_ahead_by_the_margin() -> None:
    """exp(β × mean) is a power of the geometric mean: 0.36^(2/3) and 0.16^(2/2)."""
    chosen, rejected = 0.36 ** (2 / 3), 0.16
    expected = math.log(1 + math.exp(0.6) * rejected / chosen)
    assert pair_loss(pair_of(CHOSEN, REJECTED), FREE).tolist() == pytest.approx([expected], rel=1e-12)


def test_orpo_is_the_logarithm_of_1_plus_the_inverse_odds_ratio() -> None:
    chosen, rejected = 0.36 ** (1 / 3), 0.4
    odds_ratio = (chosen / (1 - chosen)) / (rejected / (1 - rejected))
    loss = pair_loss(pair_of(CHOSEN, REJECTED), DPOConfig(loss_type=["orpo"]))
    assert loss.tolist() == pytest.approx([math.log(1 + 1 / odds_ratio)], rel=1e-12)


def test_orpo_of_an_answer_that_is_certain_is_finite() -> None:
    logprobs_P = torch.tensor([0.0, -1e-9, -40.0]).requires_grad_()
    pairs = Pairs.of(logprobs_P, None, torch.ones(3), torch.tensor([2, 1]))
    pair_loss(pairs, DPOConfig(loss_type=["orpo"])).sum().backward()
    assert logprobs_P.grad is not None
    assert logprobs_P.grad.isfinite().all()


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_gradients_are_those_of_the_value(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    logprobs_P = -torch.rand(9, generator=generator, dtype=torch.float64) - 0.05
    ref_P, mask_P = logprobs_P - 0.1 * torch.randn(9, generator=generator, dtype=torch.float64), torch.ones(9)
    mask_P[[0, 4]] = 0.0
    dpo = DPOConfig(loss_type=[name], label_smoothing=0.1)

    def value(logprobs_P: torch.Tensor) -> torch.Tensor:
        return pair_loss(Pairs.of(logprobs_P, ref_P, mask_P, torch.tensor([3, 2, 1, 3])), dpo)

    assert torch.autograd.gradcheck(value, (logprobs_P.requires_grad_(),), eps=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", ["simpo", "orpo"])
def test_losses_without_a_reference_depend_neither_on_it_nor_on_length(name: str) -> None:
    dpo = DPOConfig(loss_type=[name])
    once = pair_loss(pair_of(CHOSEN, REJECTED), dpo)
    twice = pair_of(CHOSEN * 2, REJECTED * 3)
    torch.testing.assert_close(pair_loss(twice, dpo), once)
    near = Pairs(twice.chosen, twice.rejected, twice.chosen, twice.rejected, twice.chosen_tokens, twice.rejected_tokens)
    torch.testing.assert_close(pair_loss(near, dpo), once)
    rewards = pair_metrics(twice, DPOConfig(loss_type=[name, "sft"], beta=2.0))
    assert rewards["rewards/margins"].tolist() == pytest.approx([2 * (math.log(0.36) / 3 - math.log(0.4))], rel=1e-12)


@pytest.mark.parametrize(
    ("losses", "uses"),
    [
        (["simpo"], False),
        (["sft", "orpo"], False),
        (["simpo", "orpo"], False),
        (["simpo", "sigmoid"], True),
        (["sft"], True),
    ],
)
def test_a_reference_is_there_where_a_loss_compares_with_it(losses: list[str], uses: bool) -> None:
    assert DPOConfig(loss_type=losses).uses_reference == uses
    assert not DPOConfig(loss_type=losses, reference_free=True).uses_reference


LABELLED = DPOConfig(loss_type=["kto"], beta=0.5, desirable_weight=2.0, undesirable_weight=3.0)


def test_kto_is_the_weighted_chance_of_the_wrong_verdict() -> None:
    """With β = 0.5, c = 2 log 3 and z = 2 log 1.5 the desirable answer's odds are 3 / 1.5 = 2, those of an undesirable one 1/2."""
    ratios = torch.tensor([2 * math.log(3), 2 * math.log(3)], dtype=torch.float64)
    shifts = torch.full_like(ratios, 2 * math.log(1.5))
    losses = unpaired_loss(ratios, torch.tensor([1.0, 0.0]), shifts, LABELLED)
    assert losses.tolist() == pytest.approx([2.0 * (1 - 2 / 3), 3.0 * (1 - 1 / 3)], rel=1e-12)


def test_without_a_shift_answers_of_a_pair_have_together_the_loss_of_apo_zero() -> None:
    pair, zero = pair_of(CHOSEN, REJECTED), DPOConfig(loss_type=["apo_zero"], beta=0.4)
    ratios = torch.cat([pair.chosen_ratio, pair.rejected_ratio])
    losses = unpaired_loss(ratios, torch.tensor([1.0, 0.0]), torch.zeros(2), zero)
    torch.testing.assert_close(losses.sum(), pair_loss(pair, zero).sum())


def test_kto_draws_desirable_answers_up_and_others_down_least_where_the_verdict_is_clear() -> None:
    ratios = torch.tensor([-9.0, 0.0, 9.0, -9.0, 0.0, 9.0]).requires_grad_()
    unpaired_loss(ratios, torch.tensor([1.0] * 3 + [0.0] * 3), torch.zeros(6), LABELLED).sum().backward()
    assert ratios.grad is not None
    desirable, undesirable = ratios.grad[:3], ratios.grad[3:]
    assert (desirable < 0).all()
    assert (undesirable > 0).all()
    assert desirable.argmin() == undesirable.argmax() == 1
