"""Chunked log-probabilities against the plain computation, in numbers and in memory."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.distributions import Categorical

from hpcrl.trainer.logprobs import token_logprobs
from tests.trainer.material import environment


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


MEASURE = """
import resource, sys, torch
from hpcrl.trainer.logprobs import token_logprobs
tokens, vocabulary, chunk = 2048, 32768, int(sys.argv[1])
hidden, head = torch.randn(tokens, 16, requires_grad=True), torch.randn(vocabulary, 16, requires_grad=True)
labels = torch.randint(0, vocabulary, (tokens,))
def run(rows):
    logprobs, entropy = token_logprobs(hidden[:rows], head, labels[:rows], 1.0, chunk)
    (logprobs.sum() + entropy.sum()).backward()
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
run(128)  # what is loaded and allocated once is not counted
before = peak()
run(tokens)
print(peak() - before)
"""


def test_memory_does_not_grow_with_the_tokens() -> None:
    """Peak resident memory of forward and backward over 16 times the tokens; [P, V] in float32 is 256 MiB each time it is kept."""
    logits = 2048 * 32768 * 4

    def growth(chunk_rows: int) -> int:
        command = [sys.executable, "-c", MEASURE, str(chunk_rows)]
        # malloc gives freed blocks of this size back at once, so that resident memory is memory in use
        variables = environment() | {"MALLOC_MMAP_THRESHOLD_": "65536"}
        result = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
        return int(result.stdout)

    assert growth(2048) > 2 * logits  # the measurement sees what it should
    assert growth(64) < logits / 8
