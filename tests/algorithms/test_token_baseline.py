"""The optimal token baseline: by hand, against its formula in loops, by ranks that have parts of a group, and where it is least."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from random import Random
from threading import Barrier

import pytest
import torch

from hpcrl.algorithms.advantages import AdvantageInputs, optimal_token_baseline

Sample = tuple[int, list[float], list[float], list[int]]
"""Group, rewards, squared norms and mask, one of each token."""


def inputs(samples: Sequence[Sample], everyone: Sequence[Sample] | None = None) -> AdvantageInputs:
    """Return what an estimator sees of samples, a part of those of all ranks."""
    groups = [group for group, *_ in everyone or samples]
    longest = [0] * (max(groups) + 1)
    for group, _, _, mask in everyone or samples:
        longest[group] = max(longest[group], sum(mask))
    rewards, norms, masks = (
        torch.tensor([x for sample in samples for x in sample[at]], dtype=torch.float64) for at in (1, 2, 3)
    )
    return AdvantageInputs(
        rewards_P=rewards,
        mask_P=masks,
        lengths=[len(mask) for *_, mask in samples],
        groups_B=torch.tensor([group for group, *_ in samples], dtype=torch.int64),
        norms_P=norms,
        longest=longest,
    )


def drawn(count: int = 9) -> list[Sample]:
    """Samples of three groups, of up to seven tokens, some of them not trained, rewarded at any; the last trains nothing."""
    draw, samples = Random(4), list[Sample]()
    for at in range(count):
        tokens = draw.randint(1, 7)
        mask = [int(draw.random() < 0.75) * (at < count - 1) for _ in range(tokens)]
        columns = [[draw.uniform(-1, 1) for _ in mask], [draw.random() for _ in mask]]
        samples.append((at % 3, *columns, mask))
    return samples


def by_formula(samples: Sequence[Sample]) -> list[list[float]]:
    """Return the advantages of each sample's trained tokens."""
    returns, weights = list[list[float]](), list[list[float]]()
    for _, rewards, norms, mask in samples:
        places = [at for at, one in enumerate(mask) if one]
        # a reward where nothing is trained belongs to the last trained token before it
        returns.append([sum(rewards[place:]) for place in places])
        weights.append([1e-8 + sum(norms[place] for place in places[: at + 1]) for at in range(len(places))])
    found = list[list[float]]()
    for number, (group, *_) in enumerate(samples):
        own = [at for at, (other, *_) in enumerate(samples) if other == group]
        found.append([])
        for t, value in enumerate(returns[number]):
            there = [at for at in own if len(returns[at]) > t]
            least = sum(weights[at][t] * returns[at][t] for at in there) / sum(weights[at][t] for at in there)
            found[-1].append(value - (least if len(there) > 1 else 0.0))
    return found


def split(values_P: torch.Tensor, given: AdvantageInputs) -> list[list[float]]:
    lengths = list(given.lengths)
    parts = zip(values_P.split(lengths), given.mask_P.split(lengths), strict=True)
    return [part[mask > 0].tolist() for part, mask in parts]


def test_by_hand() -> None:
    """Two responses to one prompt, with an observation in the second, and one response alone.

    Weights are 0.5 and 1.5 at the first position, 1 and 2 at the second. Returns are 1 and 0, then 1 and -1.
    """
    samples = [
        (0, [0.0, 1.0, 0.0], [0.5, 0.5, 1.0], [1, 1, 1]),
        (0, [1.0, 0.0, -1.0], [1.5, 9.0, 0.5], [1, 0, 1]),
        (1, [0.0, 2.0], [1.0, 1.0], [1, 1]),
    ]
    given = inputs(samples)
    first, second = 0.5 * 1 / 2, (1 * 1 - 2 * 1) / 3
    expected = [[1 - first, 1 - second, 0.0], [-first, -1 - second], [2.0, 2.0]]
    found = split(optimal_token_baseline(given), given)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-7)


def test_the_formula_in_loops() -> None:
    given = inputs(drawn())
    for one, other in zip(split(optimal_token_baseline(given), given), by_formula(drawn()), strict=True):
        assert one == pytest.approx(other, abs=1e-12)


def test_equal_norms_weigh_positions_alike() -> None:
    """All responses have the same weight at a position, so that it is the mean of those that have it."""
    samples = [(0, [0.0] * (n - 1) + [r], [0.3] * n, [1] * n) for n, r in ((2, 1.0), (3, 0.0), (3, 5.0))]
    found = split(optimal_token_baseline(inputs(samples)), inputs(samples))
    assert found[0] == pytest.approx([-1.0, -1.0])
    assert found[1] == pytest.approx([-2.0, -2.0, -2.5])


def test_equal_returns_leave_nothing_at_tokens_that_are_certain() -> None:
    """Responses begin with a token of probability 1, and with one that is nearly so; unequal returns have their mean there."""
    norms = [0.0, 1e-13, 0.5]
    equal = inputs([(0, [0.0, 0.0, 1.0], norms, [1, 1, 1])] * 2)
    assert optimal_token_baseline(equal).tolist() == pytest.approx([0.0] * 6, abs=1e-8)
    unequal = inputs([(0, [0.0, 0.0, reward], norms, [1, 1, 1]) for reward in (1.0, 0.0)])
    assert optimal_token_baseline(unequal).tolist() == pytest.approx([0.5] * 3 + [-0.5] * 3, abs=1e-8)


def test_no_other_baseline_leaves_less_of_the_variance() -> None:
    samples = [(0, [x], [w], [1]) for x, w in ((1.0, 0.2), (0.0, 1.1), (0.5, 0.7), (3.0, 0.05))]
    advantages = [own[0] for own in split(optimal_token_baseline(inputs(samples)), inputs(samples))]
    norms = [norm for _, _, (norm,), _ in samples]

    def power(shift: float) -> float:
        return sum(norm * (advantage - shift) ** 2 for norm, advantage in zip(norms, advantages, strict=True))

    assert all(power(shift) > power(0.0) for shift in (-0.5, -1e-3, 1e-3, 0.5))


@pytest.mark.parametrize("places", [[0] * 9, [0, 1] * 4 + [0], [2, 0, 0, 1, 2, 2, 1, 0, 2], [1] * 9])
def test_the_division_among_ranks_does_not_matter(places: list[int]) -> None:
    samples, ranks = drawn(), 3
    barrier, given = Barrier(ranks), [torch.zeros(0)] * ranks

    def summing(number: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def total(sums: torch.Tensor) -> torch.Tensor:
            given[number] = sums
            barrier.wait(600)
            found = torch.stack(given).sum(0)
            barrier.wait(600)
            return found

        return total

    def rank(number: int) -> list[list[float]]:
        own = [sample for sample, place in zip(samples, places, strict=True) if place == number]
        part = replace(inputs(own, samples), total=summing(number))
        return split(optimal_token_baseline(part), part)

    with ThreadPoolExecutor(ranks) as threads:
        found = [iter(of_rank) for of_rank in threads.map(rank, range(ranks))]
    for place, expected in zip(places, by_formula(samples), strict=True):
        assert next(found[place]) == pytest.approx(expected, abs=1e-12)
