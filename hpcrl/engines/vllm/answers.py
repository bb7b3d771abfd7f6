"""Reads the answers of vLLM's token-in, token-out route: log-probabilities, sampling masks, and the version of weights of each token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcrl.engines.vllm.middleware import LEFT_OUT, TOKEN_ID
from hpcrl.rollout.engines.base import Generation
from hpcrl.rollout.engines.experts import experts_of


@dataclass
class Running:
    """A request that the engine has yet to answer, and the versions of weights that its tokens are chosen with.

    Attributes:
        name: of the call.
        masked: whether its tokens have sampling masks.
        top: how many of the most probable tokens are wanted in the place of each.
        version: of the weights when it began.
        prompt: tokens of it.
        changes: since then, each the newer version, and how many tokens a sample had before, by its index. A sample that is missing was
            finished, or had not reached the engine: its tokens count as older ones.
    """

    name: str | None
    masked: bool
    top: int
    version: int
    prompt: int
    changes: list[tuple[int, dict[int, int]]] = field(default_factory=list)

    def versions(self, index: int, count: int) -> list[int]:
        """Return the version of each of a sample's tokens."""
        versions = list[int]()
        version = self.version
        for newer, had in self.changes:
            versions += [version] * (had.get(index, count) - len(versions))
            version = newer
        return (versions + [version] * count)[:count]


def chosen_logprobs(content: Sequence[Mapping[str, Any]], masked: bool) -> tuple[list[float], list[list[int]] | None]:
    """Return the log-probabilities of tokens, and their sampling masks."""
    logprobs = [token["logprob"] for token in content]
    if not masked:
        return logprobs, None
    kept = [[top for top in token["top_logprobs"] if top["logprob"] > LEFT_OUT] for token in content]
    masks = [[int(top["token"].removeprefix(TOKEN_ID)) for top in tops] for tops in kept]
    # top_k keeps all tokens that share the last place, of which the answer may lack some: with its probability relative to those
    # that it has, a token has the same here and in the trainer
    totals = [math.log(math.fsum(math.exp(top["logprob"]) for top in tops)) for tops in kept]
    return [logprob - total for logprob, total in zip(logprobs, totals, strict=True)], masks


def generation_of(choice: Mapping[str, Any], running: Running) -> Generation:
    content, top_ids = choice["logprobs"]["content"], None
    logprobs, masks = chosen_logprobs(content, running.masked)
    if running.top:
        top_ids = [most_probable(token["top_logprobs"], running.top) for token in content]
    told = choice.get("routed_experts")  # of a server that has enable-return-routed-experts
    return Generation(
        token_ids=choice["token_ids"],
        logprobs=logprobs,
        stop_reason=choice["finish_reason"],
        versions=running.versions(choice["index"], len(choice["token_ids"])),
        sampling_mask=masks,
        top_ids=top_ids,
        experts=experts_of(told)[: running.prompt + len(choice["token_ids"]) - 1] if told else None,
    )


def most_probable(tops: Sequence[Mapping[str, Any]], count: int) -> list[int]:
    """Return the most probable of the tokens with log-probabilities in vLLM's answer: the sampled one first, then others."""
    ordered = sorted(tops, key=lambda top: -top["logprob"])[:count]
    return [int(top["token"].removeprefix(TOKEN_ID)) for top in ordered]
