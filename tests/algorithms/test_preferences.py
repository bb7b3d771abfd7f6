"""Losses of pairs have one name everywhere, and take samples laid end to end in pairs. Their values are compared with TRL's in tests/trainer/backends."""

from __future__ import annotations

import re

import torch

from hpcrl.algorithms.preferences import LIKELIHOOD, PAIR_LOSSES, Pairs, loss_weights, pair_loss
from hpcrl.config.sections.dpo import PREFERENCE_LOSSES, DPOConfig
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
    assert [*PAIR_LOSSES, LIKELIHOOD] == list(PREFERENCE_LOSSES) == documented == list(LOSSES)


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
