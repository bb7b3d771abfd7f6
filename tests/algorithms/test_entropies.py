"""Tokens of highest entropy: by sorting, by the quantile that TRL takes, and by ranks that have parts of the tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import pytest
import torch

from hpcrl.algorithms.entropies import highest_entropies
from hpcrl.algorithms.reductions import Reduction
from hpcrl.config import AlgorithmConfig
from hpcrl.config.validate import build
from hpcrl.trainer.loss import build_objective
from tests.algorithms.material import joined, make_samples, micro_batch, weights_of

SHARES = [0.001, 0.2, 0.5, 0.99, 1.0]


def material(count: int = 101) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    mask_P = (torch.rand(count, generator=generator) < 0.7).float()
    return torch.rand(count, generator=generator).square() * 3, mask_P


def of_ranks(parts: Sequence[tuple[torch.Tensor, torch.Tensor]], share: float) -> torch.Tensor:
    """Return what ranks with these tokens find, one after the other."""
    barrier, given = Barrier(len(parts)), list[Sequence[float]]([[]] * len(parts))

    def rank(number: int) -> torch.Tensor:
        def summed(values: Sequence[float]) -> list[float]:
            given[number] = values
            barrier.wait(60)
            sums = [float(sum(column)) for column in zip(*given, strict=True)]
            barrier.wait(60)
            return sums

        return highest_entropies(*parts[number], share, summed)

    with ThreadPoolExecutor(len(parts)) as threads:
        return torch.cat(list(threads.map(rank, range(len(parts)))))


@pytest.mark.parametrize("share", SHARES)
def test_the_highest_are_those_from_the_quantile_on(share: float) -> None:
    entropies_P, mask_P = material()
    found = highest_entropies(entropies_P, mask_P, share, list)
    kept = entropies_P[mask_P > 0]
    assert found.sum() == math.floor(share * (len(kept) - 1) + 1e-9) + 1
    threshold = sorted(kept.tolist(), reverse=True)[int(found.sum()) - 1]
    assert found.tolist() == ((entropies_P >= threshold) & (mask_P > 0)).float().tolist()
    if share < 1:  # in float32, torch's quantile interpolates above its own minimum
        quantile = torch.quantile(kept.double(), 1 - share)
        assert found.tolist() == ((entropies_P >= quantile) & (mask_P > 0)).float().tolist()


@pytest.mark.parametrize("share", SHARES)
def test_the_division_among_ranks_does_not_matter(share: float) -> None:
    entropies_P, mask_P = material()
    expected = highest_entropies(entropies_P, mask_P, share, list)
    for sizes in ([50, 51], [1, 0, 100], [33, 60, 8]):
        parts = list(zip(entropies_P.split(sizes), mask_P.split(sizes), strict=True))
        assert of_ranks(parts, share).tolist() == expected.tolist(), sizes


def test_equal_entropies_are_kept_together_and_none_is_no_error() -> None:
    entropies_P = torch.tensor([0.0, 1.0, 1.0, -0.0, 5.0, 1.0])
    mask_P = torch.tensor([1.0, 1, 1, 1, 0, 1])
    assert highest_entropies(entropies_P, mask_P, 0.25, list).tolist() == [0, 1, 1, 0, 0, 1]
    assert highest_entropies(entropies_P, mask_P, 1.0, list).tolist() == mask_P.tolist()
    assert highest_entropies(entropies_P, torch.zeros(6), 0.5, list).sum() == 0
    assert highest_entropies(torch.zeros(0), torch.zeros(0), 0.5, list).tolist() == []


def test_the_policy_loss_counts_the_selected_tokens_and_other_terms_count_all() -> None:
    samples, reduction = make_samples(), Reduction("token_mean")
    weights = weights_of(samples, reduction)
    batch = micro_batch(samples, weights, [0.0] * len(samples))
    selected_P = highest_entropies(joined(samples, "entropies"), batch.loss_mask, 0.3, list)
    logprobs_P = joined(samples, "logprobs").requires_grad_()

    def gradient(selected: torch.Tensor | None, **settings: float) -> torch.Tensor:
        algorithm = {"policy_loss_type": "dro", "use_kl_loss": bool(settings), "top_entropy_quantile": 0.3, **settings}
        objective = build_objective(build(AlgorithmConfig, algorithm))
        loss, _ = objective(replace(batch, selected=selected), logprobs_P, joined(samples, "entropies"))
        return torch.autograd.grad(loss, logprobs_P)[0]

    policy = gradient(None)
    torch.testing.assert_close(gradient(selected_P), policy * selected_P)
    divergence = gradient(None, kl_loss_coef=0.5) - policy
    torch.testing.assert_close(gradient(selected_P, kl_loss_coef=0.5), policy * selected_P + divergence)
