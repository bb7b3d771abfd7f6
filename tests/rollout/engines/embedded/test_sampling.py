"""The distribution that the embedded engine samples from, and that it samples from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hpcrl.engines.embedded.sampling import RowSampling, Sampling, choose, distribution, penalised, uniform
from hpcrl.errors import RefusedRequestError

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])
CPU = torch.device("cpu")


def row(**options: Any) -> RowSampling:
    return RowSampling.of([(Sampling.of(options), 0)], CPU)


def kept(**options: Any) -> list[int]:
    return (distribution(LOGITS[None], row(**options))[0] > -torch.inf).nonzero()[:, 0].tolist()


def test_which_tokens_are_kept() -> None:
    """The probabilities are .54, .20, .12, .07, .03, .004."""
    assert kept() == [0, 1, 2, 3, 4, 5]
    assert kept(top_k=2) == [0, 1]
    assert kept(top_k=50) == kept(top_k=-1) == kept(top_k=0) == [0, 1, 2, 3, 4, 5]
    assert kept(top_p=0.5) == [0]
    assert kept(top_p=0.6) == [0, 1]
    assert kept(top_p=0.8) == [0, 1, 2]
    assert kept(min_p=0.3) == [0, 1]
    assert kept(top_p=0.8, top_k=2) == [0, 1]
    assert kept(top_p=0.7, top_k=2) == [0], "of the mass of the two that top_k keeps"
    assert kept(min_p=0.3, temperature=10.0) == [0, 1, 2, 3, 4, 5], "after the temperature"


def test_rows_have_their_own_parameters() -> None:
    options = [{}, {"top_k": 2}, {"top_p": 0.6, "temperature": 2.0}, {"min_p": 0.5}, {"temperature": 0.0}]
    rows = RowSampling.of([(Sampling.of(one), number) for number, one in enumerate(options)], CPU)
    together = distribution(LOGITS.expand(len(options), -1), rows)
    for found, one in zip(together, options, strict=True):
        torch.testing.assert_close(found, distribution(LOGITS[None], row(**one))[0])
    choice = choose(LOGITS.expand(len(options), -1), rows, torch.zeros(len(options), dtype=torch.int64))
    assert choice.tokens[4] == 0
    assert choice.kept is not None
    assert choice.kept.sum(-1).tolist() == [6, 2, 3, 1, 6]


def test_tokens_are_as_frequent_as_they_are_probable() -> None:
    count = 200_000
    rows = RowSampling.of([(Sampling(top_k=4), 3)], CPU)
    many = RowSampling(
        rows.seeds + torch.arange(count), rows.greedy.expand(count), None, None, torch.full((count,), 4), None
    )
    choice = choose(LOGITS.expand(count, -1), many, torch.arange(count) % 7)
    probabilities = distribution(LOGITS[None], rows)[0].exp()
    found = choice.tokens.bincount(minlength=6) / count
    assert (found - probabilities).abs().max() < 0.004, "three standard deviations"
    torch.testing.assert_close(choice.logprobs, probabilities.log()[choice.tokens])


def test_numbers_are_even_and_depend_on_seed_and_position() -> None:
    seeds, positions = torch.arange(1000)[:, None].expand(-1, 50), torch.arange(50).expand(1000, -1)
    numbers = uniform(seeds.reshape(-1), positions.reshape(-1))
    assert len(numbers.unique()) == 50_000
    assert 0 <= numbers.min() < numbers.max() < 1
    shares = torch.histc(numbers, 20, 0, 1) / 50_000
    assert (shares - 0.05).abs().max() < 0.004
    by_place = numbers.view(1000, 50)
    for one, other in ((by_place[:-1], by_place[1:]), (by_place[:, :-1], by_place[:, 1:])):
        assert torch.corrcoef(torch.stack([one.reshape(-1), other.reshape(-1)]))[0, 1].abs() < 0.02


def test_a_large_vocabulary_is_done_in_parts() -> None:
    generator = torch.Generator().manual_seed(0)
    logits_RV = torch.randn(300, 40_000, generator=generator)
    rows = RowSampling.of([(Sampling(top_k=20), seed) for seed in range(300)], CPU)
    whole = choose(logits_RV, rows, torch.arange(300))
    for at in (0, 104, 105, 299):
        alone = choose(logits_RV[at : at + 1], rows.part(at, at + 1), torch.tensor([at]))
        assert alone.tokens == whole.tokens[at]
        assert whole.kept is not None
        assert whole.kept[at].sum() == 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_that_were_said_are_penalised(dtype: torch.dtype) -> None:
    found = penalised(LOGITS[None].to(dtype), torch.tensor([[0, 4, 0]]), torch.tensor([2.0]))
    assert found.dtype == dtype
    assert found[0].tolist() == [1.0, 1.0, 0.5, 0.0, -2.0, -3.0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"top_pp": 0.5}, "no sampling parameter 'top_pp'; did you mean top_p"),
        ({"bad_words": []}, "no sampling parameter 'bad_words'.*backend"),
        ({"top_p": 0.0}, "top_p is 0.0; expected a number above 0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"max_tokens": 0}, "max_tokens is 0; expected a whole number, at least 1"),
        ({"min_p": 2.0}, "min_p is 2.0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"temperature": "warm"}, "temperature is 'warm'; expected a number"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"top_k": 1 << 70}, "top_k is 1180591620717411303424"),
        ({"min_tokens": 1 << 70}, "min_tokens is 1180591620717411303424"),
        ({"logprobs": 9}, "logprobs is 9; expected at most 8"),
        ({"logit_bias": {"8": 1.0}}, "logit_bias has the token id 8; expected ids from 0 to 7"),
        ({"logit_bias": {"the": 1.0}}, "logit_bias is .*; expected token ids with finite biases"),
        ({"logit_bias": {"1": float("nan")}}, "logit_bias is .*; expected token ids with finite biases"),
        ({"allowed_token_ids": [1, -1]}, "allowed_token_ids has the token id -1"),
        ({"allowed_token_ids": [1.5]}, r"allowed_token_ids is \[1.5\]; expected a list of token ids"),
        ({"stop_token_ids": [8], "min_tokens": 1}, "stop_token_ids has the token id 8"),
        ({"stop": "</s>"}, "stop is '</s>'; expected a list of texts"),
    ],
)
def test_what_it_does_not_know(options: dict[str, Any], said: str) -> None:
    with pytest.raises(RefusedRequestError, match=said):
        Sampling.of(options, vocabulary=8)
