"""The embedded engine's forward pass in blocks of tokens, by which a trainer has its log-probabilities to the last bit."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel

from hpcrl.engines.embedded.cache import ColumnCache
from hpcrl.trainer.models.packed.blocks import BLOCK, BlockLinear, NewestBlocks, rounded_up


def computes_in_blocks(model: PreTrainedModel) -> bool:
    """Return whether a model was loaded for these passes."""
    return isinstance(model.get_output_embeddings(), BlockLinear)


def all_logits(model: PreTrainedModel, tokens_1T: torch.Tensor) -> torch.Tensor:
    """Return the logits [1, T, V] of tokens of which none is cached."""
    return _logits(model, tokens_1T, 0, use_cache=False)[:, : tokens_1T.shape[1]]


def newest_logits(model: PreTrainedModel, tokens_1T: torch.Tensor, cache: ColumnCache) -> torch.Tensor:
    """Return the logits [1, V] after all tokens of a sample; those that are not cached are cached then.

    The tokens of the block that the first of these is in are computed once more.
    """
    size, first = tokens_1T.shape[1], cache.length // BLOCK * BLOCK
    cache.use(first)
    newest = {"past_key_values": cache, "use_cache": True, "logits_to_keep": BLOCK}
    logits_1QV = _logits(model, tokens_1T[:, first:], first, **newest)
    cache.use(size)
    return logits_1QV[:, (size - 1) % BLOCK]


def _logits(model: PreTrainedModel, tokens_1Q: torch.Tensor, first: int, **options: Any) -> torch.Tensor:
    size = rounded_up(tokens_1Q.shape[1])
    return cast(Any, model)(
        input_ids=pad(tokens_1Q, (0, size - tokens_1Q.shape[1])),
        position_ids=torch.arange(first, first + size, device=tokens_1Q.device)[None],
        packed=NewestBlocks(),
        **options,
    ).logits
