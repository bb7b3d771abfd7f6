"""The critic's loss: a bound on how far values move, true gradients, no dependence on layout, no NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from hpcrl.algorithms.reductions import Reduction
from hpcrl.algorithms.values import clipped_value_loss
from hpcrl.trainer.backends.base import merge
from hpcrl.trainer.critic.loss import build_critic_objective
from hpcrl.types import MicroBatch
from tests.golden.adapters.packed import sample_weights

LENGTHS = (5, 1, 7, 3, 4)
ORDERS = [[[4, 1, 0, 3, 2]], [[0], [1], [2], [3], [4]], [[2, 0], [1, 3], [4]]]


@dataclass
class Sample:
    values: torch.Tensor
    old: torch.Tensor
    returns: torch.Tensor
    mask: torch.Tensor


def make_samples(lengths: Sequence[int] = LENGTHS) -> list[Sample]:
    """Return samples of which the fourth has no trained token and others have masked ones inside."""
    generator = torch.Generator().manual_seed(1)
    samples = []
    for number, length in enumerate(lengths):
        values, change, returns = torch.randn(3, length, generator=generator, dtype=torch.float64)
        mask = torch.ones(length, dtype=torch.float64) if number != 3 else torch.zeros(length, dtype=torch.float64)
        mask[1:3:2] = 0
        samples.append(Sample(values, values + 0.2 * change, returns, mask))
    return samples


def run(
    samples: Sequence[Sample], order: Sequence[Sequence[int]]
) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Return the sums of a mini-batch and the gradient per sample, from micro-batches of these samples."""
    weights = sample_weights(Reduction("sequence_mean"), [int(sample.mask.sum()) for sample in samples])
    leaves = [sample.values.clone().requires_grad_() for sample in samples]
    totals: dict[str, torch.Tensor] = {}
    for numbers in order:
        lengths = [len(samples[number].mask) for number in numbers]
        mask_P, old_P, returns_P = (
            torch.cat([getattr(samples[number], name) for number in numbers]) for name in ("mask", "old", "returns")
        )
        weights_P = torch.tensor([weights[n] for n in numbers]).double().repeat_interleave(torch.tensor(lengths))
        ids = torch.zeros(len(mask_P), dtype=torch.int64)
        batch = MicroBatch(
            ids, ids, lengths, ids, mask_P, mask_P * weights_P, mask_P, mask_P, values=old_P, returns=returns_P
        )
        loss, sums = build_critic_objective(0.1)(batch, torch.cat([leaves[number] for number in numbers]))
        loss.backward()
        merge(totals, sums)
    return totals, [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves]


@pytest.mark.parametrize("order", ORDERS, ids=["permuted", "one by one", "uneven"])
def test_layout_does_not_matter(order: list[list[int]]) -> None:
    expected = run(make_samples(), [[0, 1, 2, 3, 4]])
    torch.testing.assert_close(run(make_samples(), order), expected, rtol=1e-6, atol=1e-8)
    assert 0 < expected[0]["clipfrac"] < expected[0]["tokens"]
    assert expected[1][3].abs().max() == 0, "nothing of it is trained"


def test_the_loss_is_the_mean_over_samples_of_means_over_their_tokens() -> None:
    samples = make_samples()
    losses = []
    for sample in samples:
        near = torch.maximum(torch.minimum(sample.values, sample.old + 0.1), sample.old - 0.1)
        loss = torch.maximum((sample.values - sample.returns) ** 2, (near - sample.returns) ** 2)[sample.mask > 0]
        losses.append(loss.mean() / 2 if len(loss) else torch.tensor(0.0))
    assert run(samples, [[0, 1, 2, 3, 4]])[0]["loss"].item() == pytest.approx(sum(losses).item() / 5)


@pytest.mark.parametrize("value_clip", [0.0, 0.1, 10.0])
def test_gradients_are_those_of_the_value(value_clip: float) -> None:
    (sample,) = make_samples([9])

    def value(values_P: torch.Tensor) -> torch.Tensor:
        return clipped_value_loss(values_P, sample.old, sample.returns, sample.mask, value_clip=value_clip)[0].sum()

    assert torch.autograd.gradcheck(value, (sample.values.clone().requires_grad_(),), eps=1e-6, atol=1e-8)


def test_a_bound_of_0_is_none_and_a_wide_one_changes_nothing() -> None:
    (sample,) = make_samples([9])
    tensors = (sample.values, sample.old, sample.returns, sample.mask)
    free, sums = clipped_value_loss(*tensors, value_clip=0.0)
    torch.testing.assert_close(free, (sample.values - sample.returns).square() / 2)
    assert sums["clipfrac"] == 0
    wide, sums = clipped_value_loss(*tensors, value_clip=1e3)
    torch.testing.assert_close(wide, free)
    assert sums["clipfrac"] == 0


def test_a_value_beyond_the_bound_is_left_where_it_is() -> None:
    """One that has moved further towards the return than it may has no gradient; one that has moved away still has."""
    values = torch.tensor([0.5, -0.5], requires_grad=True)
    loss, sums = clipped_value_loss(values, torch.zeros(2), torch.ones(2), torch.ones(2), value_clip=0.2)
    loss.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0.0, -1.5])
    assert sums["clipfrac"] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("size", [1.0, 1e4])
def test_everything_is_finite(dtype: torch.dtype, length: int, size: float) -> None:
    for mask in (torch.ones(length), torch.zeros(length)):
        values = (torch.ones(length) * size).to(dtype).requires_grad_()
        tensors = (-torch.ones(length) * size, torch.full((length,), 0.5), mask)
        loss, sums = clipped_value_loss(values, *(tensor.to(dtype) for tensor in tensors), value_clip=0.2)
        loss.sum().backward()
        assert loss.dtype == torch.float32
        assert values.grad is not None
        assert torch.isfinite(values.grad).all()
        assert torch.isfinite(loss).all()
        assert sums["clipfrac"] <= mask.sum()
