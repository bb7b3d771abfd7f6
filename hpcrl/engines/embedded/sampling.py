"""The distribution that tokens are sampled from, and the sampling: many rows at once, each by its own parameters and its own seed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from hpcrl.errors import RefusedRequestError, did_you_mean

_GREEDY = 1e-5  # temperatures below: the most probable token
_NEGLIGIBLE = -float("inf")
_LARGEST = 1 << 63  # beyond int64
_TOKEN_ID = re.compile(r"-?[0-9]{1,18}")
_ELEMENTS = 1 << 22  # of logits that are processed at the same time

_GOLDEN, _MIX_1, _MIX_2 = (value - (1 << 64) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < _LARGEST


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_token_id(value: Any) -> bool:
    return _is_whole(value, -_LARGEST + 1)


def _are_ids(value: Any) -> bool:
    return value is None or (
        isinstance(value, Sequence) and not isinstance(value, str) and all(map(_is_token_id, value))
    )


def _are_biases(value: Any) -> bool:
    """Return whether a value is an object of biases; its keys are texts where it was written as JSON or TOML."""
    return value is None or (
        isinstance(value, Mapping)
        and all(_is_token_id(one) or (isinstance(one, str) and _TOKEN_ID.fullmatch(one)) for one in value)
        and all(map(_is_number, value.values()))
    )


def _are_texts(value: Any) -> bool:
    texts = isinstance(value, Sequence) and not isinstance(value, str)
    return value is None or (texts and all(isinstance(one, str) and one for one in value))


_EXPECTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_tokens": (lambda value: _is_whole(value, 1), "a whole number, at least 1"),
    "min_tokens": (lambda value: _is_whole(value, 0), "a whole number, at least 0"),
    "temperature": (lambda value: _is_number(value) and value >= 0, "a number, at least 0"),
    "top_p": (lambda value: _is_number(value) and 0 < value <= 1, "a number above 0 and at most 1"),
    "top_k": (lambda value: _is_whole(value, -1), "a whole number, at least 1, or 0 or -1 for all"),
    "min_p": (lambda value: _is_number(value) and 0 <= value <= 1, "a number from 0 to 1"),
    "repetition_penalty": (lambda value: _is_number(value) and value > 0, "a number above 0"),
    "ignore_eos": (lambda value: isinstance(value, bool), "true or false"),
    "logprobs": (lambda value: _is_whole(value, 0), "a whole number, at least 0"),
    "stop": (_are_texts, "a list of texts"),
    "stop_token_ids": (_are_ids, "a list of token ids"),
    "logit_bias": (_are_biases, "token ids with finite biases"),
    "allowed_token_ids": (_are_ids, "a list of token ids"),
}
"""By parameter: whether a value is one, and what is."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of a request; names are vLLM's.

    Attributes:
        logprobs: above 0: the tokens that each was sampled among are wanted too, or, where sampling leaves none out, as many of the most
            probable ones.
        logit_bias: what is added to the logits of tokens.
        stop_token_ids: ids that end a response, with `ignore_eos` too.
        allowed_token_ids: the only tokens to sample; empty: every token.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    logprobs: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, given: Mapping[str, Any], vocabulary: int | None = None) -> Sampling:
        """Parse the parameters of a request.

        Args:
            vocabulary: tokens of the model, which ids of tokens and `logprobs` must fit; None: any.

        Raises:
            RefusedRequestError: it has a parameter that this engine does not know, a value that means nothing, or a token that the model lacks.
        """
        known = {field.name for field in fields(cls)}
        for name in given.keys() - known:
            raise RefusedRequestError(
                f"the embedded engine has no sampling parameter {name!r}{did_you_mean(name, known)}; "
                'those of vLLM need generator.inference_engine.backend = "vllm"'
            )
        for name, value in given.items():
            is_right, expected = _EXPECTED[name]
            if not is_right(value):
                raise RefusedRequestError(f"{name} is {value!r:.140}; expected {expected}")
        biases = ((int(token_id), float(bias)) for token_id, bias in (given.get("logit_bias") or {}).items())
        tuples = {name: tuple(given.get(name) or ()) for name in ("stop", "stop_token_ids", "allowed_token_ids")}
        found = cls(**{**given, **tuples, "logit_bias": tuple(biases)})
        if vocabulary is not None:
            found._require_tokens(vocabulary)
        return found

    def _require_tokens(self, vocabulary: int) -> None:
        if self.logprobs > vocabulary:
            raise RefusedRequestError(f"logprobs is {self.logprobs}; expected at most {vocabulary}, the model's tokens")
        for name, ids in (
            ("logit_bias", [token_id for token_id, _ in self.logit_bias]),
            ("stop_token_ids", self.stop_token_ids if self.min_tokens else ()),  # of others none is ever looked up
            ("allowed_token_ids", self.allowed_token_ids),
        ):
            for token_id in ids:
                if not 0 <= token_id < vocabulary:
                    raise RefusedRequestError(
                        f"{name} has the token id {token_id}; expected ids from 0 to {vocabulary - 1}, which the model has"
                    )

    @property
    def greedy(self) -> bool:
        return self.temperature < _GREEDY


@dataclass(frozen=True)
class Choice:
    """Sampled tokens.

    Attributes:
        tokens: [R] int64.
        logprobs: [R] float32, of each under the distribution it was sampled from.
        kept: [R, V] bool, the tokens it was sampled among; None where sampling leaves none out.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor
    kept: torch.Tensor | None


@dataclass
class RowSampling:
    """Parameters of rows, [R] each; one that no row has is None."""

    seeds: torch.Tensor
    greedy: torch.Tensor
    temperature: torch.Tensor | None
    top_p: torch.Tensor | None
    top_k: torch.Tensor | None
    min_p: torch.Tensor | None

    @classmethod
    def of(cls, rows: list[tuple[Sampling, int]], device: torch.device) -> RowSampling:
        """Return those of rows, each with its seed."""

        def column(name: str, idle: tuple[float, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor | None:
            values = [getattr(sampling, name) for sampling, _ in rows]
            return None if all(value in idle for value in values) else torch.tensor(values, dtype=dtype, device=device)

        return cls(
            seeds=torch.tensor([seed for _, seed in rows], dtype=torch.int64, device=device),
            greedy=torch.tensor([sampling.greedy for sampling, _ in rows], device=device),
            temperature=column("temperature", (1.0, 0.0)),
            top_p=column("top_p", (1.0,)),
            top_k=column("top_k", (0, -1), torch.int64),
            min_p=column("min_p", (0.0,)),
        )

    def part(self, begin: int, end: int) -> RowSampling:
        others = (self.temperature, self.top_p, self.top_k, self.min_p)
        return RowSampling(
            self.seeds[begin:end], self.greedy[begin:end], *(None if one is None else one[begin:end] for one in others)
        )

    @property
    def leaves_out(self) -> bool:
        return not (self.top_p is None and self.top_k is None and self.min_p is None)


def choose(logits_RV: torch.Tensor, rows: RowSampling, positions: torch.Tensor) -> Choice:
    """Return a token for each row.

    Args:
        positions: [R] int64, how many tokens the row has generated before. A token depends on its logits, the row's seed and this number.
    """
    at_once = max(1, _ELEMENTS // logits_RV.shape[1])
    parts = [
        _choose(logits_RV[at : at + at_once], rows.part(at, at + at_once), positions[at : at + at_once])
        for at in range(0, len(logits_RV), at_once)
    ]
    if len(parts) == 1:
        return parts[0]
    kept = [part.kept for part in parts if part.kept is not None]
    return Choice(
        torch.cat([part.tokens for part in parts]),
        torch.cat([part.logprobs for part in parts]),
        torch.cat(kept) if kept else None,
    )


def _choose(logits_RV: torch.Tensor, rows: RowSampling, positions: torch.Tensor) -> Choice:
    logprobs_RV = distribution(logits_RV.float(), rows)
    tokens = _drawn(logprobs_RV.exp(), uniform(rows.seeds, positions))
    if rows.greedy.any():
        tokens = torch.where(rows.greedy, logprobs_RV.argmax(-1), tokens)
    chosen = logprobs_RV.gather(1, tokens[:, None])[:, 0]
    return Choice(tokens, chosen, logprobs_RV > _NEGLIGIBLE if rows.leaves_out else None)


def distribution(logits_RV: torch.Tensor, rows: RowSampling) -> torch.Tensor:
    """Return the log-probabilities [R, V] that rows sample from: temperature, then min_p, top_k and top_p as vLLM applies them."""
    if rows.temperature is not None:
        logits_RV = logits_RV / torch.where(rows.greedy, 1.0, rows.temperature)[:, None]
    if rows.min_p is not None:
        least = logits_RV.amax(-1, keepdim=True) + rows.min_p.log()[:, None]
        logits_RV = logits_RV.masked_fill(logits_RV < least, _NEGLIGIBLE)
    if rows.top_k is not None or rows.top_p is not None:
        logits_RV = _most_probable(logits_RV, rows)
    return torch.log_softmax(logits_RV, -1)


def _most_probable(logits_RV: torch.Tensor, rows: RowSampling) -> torch.Tensor:
    ordered_RV = logits_RV.sort(-1, descending=True).values
    size = logits_RV.shape[1]
    if rows.top_k is not None:
        places = torch.where(rows.top_k > 0, rows.top_k, size).clamp(max=size) - 1
        least = ordered_RV.gather(1, places[:, None])
        logits_RV = logits_RV.masked_fill(logits_RV < least, _NEGLIGIBLE)
        ordered_RV = ordered_RV.masked_fill(ordered_RV < least, _NEGLIGIBLE)
    if rows.top_p is not None:
        probs_RV = ordered_RV.softmax(-1)
        before_RV = probs_RV.cumsum(-1) - probs_RV
        last = (before_RV < rows.top_p[:, None]).sum(-1, keepdim=True) - 1
        least = ordered_RV.gather(1, last)
        logits_RV = logits_RV.masked_fill(logits_RV < least, _NEGLIGIBLE)
    return logits_RV


def penalised(logits_RV: torch.Tensor, said_RC: torch.Tensor, penalties: torch.Tensor) -> torch.Tensor:
    """Return logits in which tokens that a row has had are less probable (arXiv:1909.05858, section 4.1).

    Args:
        said_RC: tokens of each row.
        penalties: [R], above 1 for less probable.
    """
    had = logits_RV.gather(1, said_RC)
    less = torch.where(had > 0, had / penalties[:, None], had * penalties[:, None])
    return logits_RV.scatter(1, said_RC, less.to(logits_RV.dtype))


def biases(rows: Sequence[Sampling], device: torch.device) -> torch.Tensor | None:
    """Return the biases of rows, [R, K, 2] float32, token and bias, padded with a bias of 0; None: no row has any."""
    most = max((len(row.logit_bias) for row in rows), default=0)
    if not most:
        return None
    padded = [[*row.logit_bias, *[(0, 0.0)] * (most - len(row.logit_bias))] for row in rows]
    return torch.tensor(padded, dtype=torch.float32, device=device)


def biased(logits_RV: torch.Tensor, biases_RK2: torch.Tensor) -> torch.Tensor:
    """Return logits with the biases of their rows."""
    return logits_RV.scatter_add(1, biases_RK2[..., 0].long(), biases_RK2[..., 1].to(logits_RV.dtype))


def allowed(rows: Sequence[Sampling], device: torch.device) -> torch.Tensor | None:
    """Return the allowed tokens of each row, [R, K] int64, padded with its first, -1 for all; None: no row is restricted."""
    most = max((len(row.allowed_token_ids) for row in rows), default=0)
    if not most:
        return None
    ids = {own: [*own, *[own[0] if own else -1] * (most - len(own))] for own in {row.allowed_token_ids for row in rows}}
    return torch.tensor([ids[row.allowed_token_ids] for row in rows], device=device)


def among_allowed(logits_RV: torch.Tensor, ids_RK: torch.Tensor) -> torch.Tensor:
    """Return logits with those of other tokens than the allowed ones so low that their probability is 0."""
    ids = ids_RK.clamp(min=0)
    kept_RV = torch.full_like(logits_RV, _NEGLIGIBLE).scatter(1, ids, logits_RV.gather(1, ids))
    return torch.where(ids_RK[:, :1] < 0, logits_RV, kept_RV)


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return a number in [0, 1) for each seed and position, [R] float64: SplitMix64 (Steele et al., OOPSLA 2014), which vectors can compute."""
    mixed = _mix(_mix(seeds + _GOLDEN) + (positions + 1) * _GOLDEN)
    return (
        (mixed >> 12) & ((1 << 52) - 1)
    ).double() * 2.0**-52  # so few bits that no product with a sum is rounded up to the sum


def _mix(z: torch.Tensor) -> torch.Tensor:
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _MIX_1
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _MIX_2
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def _drawn(probs_RV: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return a token for each row: the first at which the sum of probabilities is above the row's number."""
    sums_RV = probs_RV.cumsum(-1, dtype=torch.float64)
    wanted = uniforms[:, None] * sums_RV[:, -1:]
    return torch.searchsorted(sums_RV, wanted, right=True)[:, 0].clamp(max=probs_RV.shape[1] - 1)
