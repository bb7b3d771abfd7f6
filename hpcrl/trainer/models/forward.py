"""Settings of the forward pass, in training and in scoring, and the names of number types."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from hpcrl.config.sections.model import ExpertsConfig
from hpcrl.trainer.models.logprobs import Entropy

DTYPES = {
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


@dataclass(frozen=True, kw_only=True)
class ForwardConfig:
    """How a backend computes a forward pass.

    Attributes:
        temperature: divides the logits.
        chunk_rows: tokens whose logits exist at the same time.
        packing: samples lie end to end; otherwise each is a padded row.
        flash: flash attention is used where there is one.
        flash_version: of FlashAttention; None: torch's choice.
        in_blocks: log-probabilities are those of the embedded engine to the last bit, on CPUs (hpcrl/trainer/models/packed/blocks.py).
        compiled: log-probabilities and entropies are computed by compiled code.
        dtype: of the logits from which log-probabilities are computed.
        entropy_loss: the loss has an entropy term, so that entropies are differentiable in training.
        scored: what scoring computes beside log-probabilities.
        vocabulary: tokens that the policy knows, where the model's head may have more; None: those of the head.
        experts: what routers of a mixture of experts are asked for; None: nothing.
        never_said: tokens that no engine samples, whose probability is 0 here too.
        only_said: the tokens that engines sample, where those are the actions of a robot; None: all but `never_said`.
    """

    temperature: float
    chunk_rows: int
    packing: bool = True
    flash: bool = True
    flash_version: int | None = None
    in_blocks: bool = False
    compiled: bool = False
    dtype: torch.dtype = torch.float32
    entropy_loss: bool = True
    scored: Entropy = "none"
    vocabulary: int | None = None
    experts: ExpertsConfig | None = None
    never_said: tuple[int, ...] = ()
    only_said: range | None = None

    @property
    def entropy(self) -> Entropy:
        """What entropies are for in the pass that runs now: in scoring, without gradient, `scored`."""
        if not torch.is_grad_enabled():
            return self.scored
        return "trained" if self.entropy_loss else "metric"


class HasForwardConfig(Protocol):
    forward_config: ForwardConfig


@contextmanager
def computing(head: HasForwardConfig, **changes: Any) -> Iterator[None]:
    """Change options of the forward pass for a while.

    Args:
        changes: of ForwardConfig, such as temperature=1.0.
    """
    kept, head.forward_config = head.forward_config, replace(head.forward_config, **changes)
    try:
        yield
    finally:
        head.forward_config = kept


def score_places(
    token_ids: torch.Tensor, cu_seqlens: torch.Tensor, padding: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the last position of each sample [B] int64, where its score is put, and the one that gives it, [B] int64.

    As in transformers' classifiers, that is the last one whose token is not the padding token.

    Args:
        token_ids: [P].
        cu_seqlens: [B + 1], where samples begin and the last one ends.
    """
    ends_B, places_P = cu_seqlens[1:].long() - 1, torch.arange(len(token_ids), device=token_ids.device)
    if padding is not None:
        places_P = torch.where(token_ids != padding, places_P, -1).cummax(0).values
    return ends_B, torch.maximum(places_P[ends_B], cu_seqlens[:-1].long())
