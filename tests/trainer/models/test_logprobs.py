"""Chunked log-probabilities against the plain computation, in numbers and in memory."""

from __future__ import annotations

import math
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch.distributions import Categorical

from hpcrl.trainer.models.forward import ForwardConfig
from hpcrl.trainer.models.logprobs import Entropy, compiled_rows, token_logprobs, top_rows
from tests.trainer.launcher import environment


@pytest.mark.parametrize("chunk_rows", [1, 7, 32, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_equal_to_the_plain_computation(chunk_rows: int, temperature: float) -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(32, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    labels, weights = torch.randint(0, 50, (32,)), torch.randn(2, 32)

    def gradients(logprobs: torch.Tensor, entropy: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad((logprobs * weights[0] + entropy * weights[1]).sum(), (hidden, head))

    plain = Categorical(logits=hidden @ head.T / temperature)
    expected = (plain.log_prob(labels), plain.entropy())
    actual = token_logprobs(hidden, head, labels, temperature, chunk_rows)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(gradients(*actual), gradients(*expected), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("entropy", ["trained", "metric", "none"])
@pytest.mark.parametrize("chunk_rows", [7, 100])
def test_other_tokens_than_the_labels_are_differentiable_too(chunk_rows: int, entropy: Entropy) -> None:
    """Their log-probabilities are those of the whole vocabulary, also where the label was sampled among a few tokens."""
    draw = torch.Generator().manual_seed(5)
    hidden, head = (torch.randn(n, 8, generator=draw).requires_grad_() for n in (32, 50))
    mask = torch.stack([torch.randperm(50, generator=draw)[:6] for _ in range(32)]).int()
    ids = torch.stack([torch.randperm(50, generator=draw)[:3] for _ in range(32)]).int()
    labels, weights_RK = mask[:, 2].long(), torch.randn(32, 3, generator=draw)
    logprobs, _, found = token_logprobs(
        hidden, head, labels, 0.6, chunk_rows, entropy=entropy, mask_PK=mask, ids_PK=ids
    )
    expected = (hidden @ head.T / 0.6).log_softmax(-1).gather(1, ids.long())
    torch.testing.assert_close(found, expected)
    alone, _ = token_logprobs(hidden, head, labels, 0.6, chunk_rows, entropy=entropy, mask_PK=mask)
    torch.testing.assert_close(logprobs, alone)
    gradients = torch.autograd.grad((found * weights_RK).sum() + logprobs.sum(), (hidden, head))
    by_hand = torch.autograd.grad((expected * weights_RK).sum() + alone.sum(), (hidden, head))
    torch.testing.assert_close(gradients, by_hand, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("vocabulary", [None, 30])
def test_the_most_probable_tokens_are_of_those_that_the_policy_knows(vocabulary: int | None) -> None:
    draw = torch.Generator().manual_seed(5)
    hidden, head = (torch.randn(n, 8, generator=draw) for n in (32, 50))
    labels, whole = torch.randint(0, 30, (32,), generator=draw), (hidden @ head.T / 0.6).log_softmax(-1)
    rows = partial(top_rows, 3, vocabulary)
    logprobs, ids, top = token_logprobs(hidden, head, labels, 0.6, 7, rows)
    assert ids.tolist() == whole[:, :vocabulary].topk(3).indices.tolist()
    torch.testing.assert_close(top, whole.gather(1, ids))
    torch.testing.assert_close(logprobs, whole.gather(1, labels[:, None])[:, 0])
    given = torch.randint(0, 50, (32, 4), generator=draw)
    _, same, found = token_logprobs(hidden, head, labels, 0.6, 7, rows, ids_PK=given.int())
    assert torch.equal(same, given)
    torch.testing.assert_close(found, whole.gather(1, given))


@pytest.mark.parametrize("chunk_rows", [1, 7, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_sampling_mask_leaves_the_other_tokens_without_probability(chunk_rows: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(3)
    hidden, head = (torch.randn(n, 8, generator=draw).requires_grad_() for n in (32, 50))
    mask = torch.stack([torch.randperm(50, generator=draw)[:6] for _ in range(32)]).int()
    labels, weights = mask[:, 2].long(), torch.randn(2, 32, generator=draw)
    mask[::3] = -1  # the whole vocabulary
    mask[1::3, 4:] = -1  # padding
    kept = torch.zeros(32, 51, dtype=torch.bool).scatter(1, torch.where(mask < 0, 50, mask).long(), True)[:, :50]
    kept[::3] = True

    def both(logprobs: torch.Tensor, entropy: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gradients = torch.autograd.grad((logprobs * weights[0] + entropy * weights[1]).sum(), (hidden, head))
        return logprobs.detach(), entropy.detach(), *gradients

    logits = hidden @ head.T / 0.6
    plain = logits.where(kept, torch.tensor(-torch.inf)).log_softmax(-1)
    entropy = -(plain.exp() * plain.where(kept, torch.tensor(0.0))).sum(-1)
    expected = both(plain.gather(1, labels[:, None])[:, 0], entropy)
    actual = both(*token_logprobs(hidden, head, labels, 0.6, chunk_rows, dtype=dtype, mask_PK=mask))
    assert max(worst(actual, expected)) < 16 * torch.finfo(dtype).eps


def test_sampling_masks_in_compiled_code() -> None:
    draw = torch.Generator().manual_seed(4)
    rows, head = compiled_rows(), torch.randn(50, 8, generator=draw)
    for count, width in ((9, 4), (7, 3), (8, 6)):
        hidden, mask = torch.randn(count, 8, generator=draw), torch.randint(0, 50, (count, width), generator=draw).int()
        actual = token_logprobs(hidden, head, mask[:, 0].long(), 0.6, 99, rows, mask_PK=mask)
        expected = token_logprobs(hidden, head, mask[:, 0].long(), 0.6, 99, mask_PK=mask)
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("chunk_rows", [7, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_those_of_the_gradients_over_the_logits(chunk_rows: int, dtype: torch.dtype) -> None:
    """By autograd in float64, in whole vocabularies and among sampled tokens, from drawn labels to ones of probability 1 - 1e-4."""
    draw = torch.Generator().manual_seed(3)
    hidden, head = (torch.randn(n, 8, generator=draw) for n in (32, 50))
    mask = torch.stack([torch.randperm(50, generator=draw)[:6] for _ in range(32)]).int()
    mask[::2] = -1
    labels = torch.where(mask[:, 2] < 0, torch.randint(0, 50, (32,), generator=draw), mask[:, 2]).long()
    hidden[-8:], mask[-8:] = 3 * head[labels[-8:]], -1
    kept = torch.ones(32, 50, dtype=torch.bool)
    for row in range(1, 24, 2):
        kept[row] = torch.isin(torch.arange(50), mask[row])
    logits = (hidden.to(dtype) @ head.to(dtype).T).double().requires_grad_()
    logprobs = (logits / 0.6).masked_fill(~kept, -torch.inf).log_softmax(-1)
    (gradient,) = torch.autograd.grad(logprobs.gather(1, labels[:, None]).sum(), logits)
    expected = (0.6 * gradient).square().sum(-1)
    assert expected.min() < 1e-6 < 1 < expected.max()
    for asked in (True, False):
        hidden.requires_grad_(asked)
        found = token_logprobs(
            hidden.to(dtype), head.to(dtype), labels, 0.6, chunk_rows, dtype=dtype, entropy="norms", mask_PK=mask
        )
        plain = token_logprobs(hidden.to(dtype), head.to(dtype), labels, 0.6, chunk_rows, dtype=dtype, mask_PK=mask)
        assert torch.equal(found[0], plain[0])
        assert found[1].dtype == torch.float32
        assert not found[1].requires_grad
        close = {"rtol": 1e-4, "atol": 1e-7} if dtype == torch.float32 else {"rtol": 0.1, "atol": 1e-4}
        torch.testing.assert_close(found[1].double(), expected, **close)


def worst(actual: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> list[float]:
    """Return the largest error of each tensor, against its largest value."""
    pairs = zip(actual, expected, strict=True)
    return [((got.double() - wanted).abs().max() / wanted.abs().max()).item() for got, wanted in pairs]


@pytest.mark.parametrize("chunk_rows", [7, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_type_is_as_accurate_as_it_can_be(dtype: torch.dtype, chunk_rows: int) -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(64, 8, requires_grad=True), torch.randn(500, 8, requires_grad=True)
    labels, weights = torch.randint(0, 500, (64,)), torch.randn(2, 64)

    def both(logprobs: torch.Tensor, entropy: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gradients = torch.autograd.grad((logprobs * weights[0] + entropy * weights[1]).sum(), (hidden, head))
        return logprobs.detach(), entropy.detach(), *gradients

    plain = Categorical(logits=hidden.double() @ head.T.double() / 0.6)
    expected = both(plain.log_prob(labels), plain.entropy())
    actual = both(*token_logprobs(hidden, head, labels, 0.6, chunk_rows, dtype=dtype))
    assert [tensor.dtype for tensor in actual] == [torch.float32] * 4
    errors = worst(actual, expected)
    step = torch.finfo(dtype).eps
    assert max(errors) < 16 * step
    assert max(errors) > step / 16  # a 16-bit type is not computed in more bits and called so


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_over_a_large_vocabulary_do_not_overflow(dtype: torch.dtype) -> None:
    """150 000 equal logits: their sum is beyond float16, and each is too small for a sum that bfloat16 holds."""
    hidden, head = torch.ones(2, 1, requires_grad=True), torch.zeros(150_000, 1)
    logprobs, entropy = token_logprobs(hidden, head, torch.tensor([0, 149_999]), 1.0, 1, dtype=dtype)
    (logprobs.sum() + entropy.sum()).backward()
    log_size = math.log(150_000)
    assert logprobs.tolist() == pytest.approx([-log_size] * 2, rel=torch.finfo(dtype).eps)
    assert entropy.tolist() == pytest.approx([log_size] * 2, rel=3e-2)  # exp makes the rounding of -12 twelvefold
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()


def test_compiled_once_for_any_number_of_rows() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()  # another test may have compiled it in this process
    rows, head = compiled_rows(), torch.randn(50, 8, requires_grad=True)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for count in (32, 23, 17):
        hidden, labels = torch.randn(count, 8, requires_grad=True), torch.randint(0, 50, (count,))
        actual = token_logprobs(hidden, head, labels, 0.6, 9, rows)
        torch.testing.assert_close(actual, token_logprobs(hidden, head, labels, 0.6, 9), atol=1e-5, rtol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1


MEASURE = """
import sys, torch
from pathlib import Path
from hpcrl.trainer.models.logprobs import token_logprobs
tokens, vocabulary, chunk = 1024, 16384, int(sys.argv[1])
hidden, head = torch.randn(tokens, 16, requires_grad=True), torch.randn(vocabulary, 16, requires_grad=True)
labels = torch.randint(0, vocabulary, (tokens,))
def run(rows):
    logprobs, entropy = token_logprobs(hidden[:rows], head, labels[:rows], 1.0, chunk)
    (logprobs.sum() + entropy.sum()).backward()
def resident(name):
    return next(int(line.split()[1]) * 1024 for line in Path("/proc/self/status").open() if line.startswith(name))
run(128)  # what is loaded and allocated once is not counted
Path("/proc/self/clear_refs").write_text("5")  # peak := now
before = resident("VmRSS")
run(tokens)
print(resident("VmHWM") - before)
"""


def test_memory_does_not_grow_with_the_tokens() -> None:
    """Peak resident memory of forward and backward; [P, V] in float32 is 64 MiB each time it is kept."""
    logits = 1024 * 16384 * 4

    def growth(chunk_rows: int) -> int:
        command = [sys.executable, "-c", MEASURE, str(chunk_rows)]
        # so malloc gives large blocks back at once, and resident memory is memory in use
        variables = environment() | {"MALLOC_MMAP_THRESHOLD_": "65536"}
        result = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
        return int(result.stdout)

    assert growth(1024) > 2 * logits  # the measurement sees what it should
    assert growth(32) < logits / 4  # 5 times [32, V] is 10 MiB


@pytest.mark.parametrize("chunk_rows", [4, 64])
def test_an_entropy_that_is_only_reported_costs_no_gradient(chunk_rows: int) -> None:
    draw = torch.Generator().manual_seed(1)
    hidden, head = (torch.randn(n, 8, generator=draw).requires_grad_() for n in (11, 50))
    labels = torch.randint(0, 50, (11,), generator=draw)
    trained, metric, none = (
        token_logprobs(hidden, head, labels, 0.6, chunk_rows, entropy=entropy)
        for entropy in ("trained", "metric", "none")
    )
    assert trained[1].requires_grad
    assert not metric[1].requires_grad
    assert torch.equal(trained[0], metric[0])
    assert torch.equal(trained[0], none[0])
    assert torch.equal(trained[1], metric[1])
    assert none[1].eq(0).all()
    gradients = [torch.autograd.grad(logprobs.sum(), hidden)[0] for logprobs, _ in (trained, metric, none)]
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])


def test_slices_round_the_gradient_of_the_head_once() -> None:
    """As one pass over all rows does; where each slice's is added in bfloat16, 64 of them are several times as far off."""
    torch.manual_seed(0)
    hidden, head, labels = torch.randn(512, 16), torch.randn(100, 16), torch.randint(0, 100, (512,))

    def gradient(chunk_rows: int, dtype: torch.dtype) -> torch.Tensor:
        weight = head.to(dtype, copy=True).requires_grad_()
        token_logprobs(hidden.to(dtype), weight, labels, 1.0, chunk_rows)[0].sum().backward()
        assert weight.grad is not None
        return weight.grad.double()

    exact = gradient(512, torch.float32)
    once, sliced = ((gradient(rows, torch.bfloat16) - exact).norm() for rows in (512, 8))
    assert sliced < 1.2 * once


def test_scoring_asks_for_no_entropy() -> None:
    assert ForwardConfig(temperature=1.0, chunk_rows=1, entropy_loss=False).entropy == "metric"
    assert ForwardConfig(temperature=1.0, chunk_rows=1, entropy_loss=True).entropy == "trained"
    with torch.no_grad():
        assert ForwardConfig(temperature=1.0, chunk_rows=1, entropy_loss=True).entropy == "none"
        assert ForwardConfig(temperature=1.0, chunk_rows=1, scored="norms").entropy == "norms"
