"""Log-probabilities and entropies where each rank has a part of the vocabulary (M. Shoeybi et al., arXiv:1909.08053, section 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from torch.distributed import ProcessGroup
from torch.nn.functional import linear

from hpcrl.trainer.models.logprobs import Entropy, among

_NOTHING = -1e30  # a logit whose token is never drawn; an infinity would make entropies undefined


@dataclass(frozen=True)
class VocabularyShare:
    """A rank's part of the vocabulary: tokens from `first` up to `first` + `size`, of which those from `end` on are padding."""

    group: ProcessGroup
    first: int
    size: int
    end: int

    @classmethod
    def of(cls, group: ProcessGroup, size: int, vocabulary: int) -> VocabularyShare:
        """Return this rank's, of `size` rows of the head."""
        return cls(group, dist.get_rank(group) * size, size, vocabulary)

    def rows(
        self,
        hidden_RD: torch.Tensor,
        head_VD: torch.Tensor,
        labels_R: torch.Tensor,
        temperature: float,
        dtype: torch.dtype,
        entropy: Entropy = "trained",
        mask_RK: torch.Tensor | None = None,
        ids_RK: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Return log-probabilities of the labels and entropies, [R] float32 each, the same on all ranks of the group.

        Args:
            head_VD: this rank's rows.
            dtype: to which logits are rounded; what follows is float32.
            mask_RK: sampling masks, as of token_logprobs.
            ids_RK: other tokens of each row, as of `plain_rows`.
        """
        whole = self._logits(hidden_RD, head_VD, temperature, dtype)
        logits, weights, total_R = self._shifted(whole if mask_RK is None else among(whole, mask_RK, self.first))
        logprob_R = self._logprobs(logits, total_R, labels_R[:, None])[:, 0]
        more: tuple[torch.Tensor, ...] = ()
        if ids_RK is not None:
            others, _, of_all_R = (logits, weights, total_R) if mask_RK is None else self._shifted(whole)
            more = (self._logprobs(others, of_all_R, ids_RK),)
        if entropy == "none":
            return logprob_R, logprob_R.new_zeros(len(logprob_R)), *more
        if entropy == "norms":
            return logprob_R, self._squared_norms(weights.detach(), total_R.detach(), labels_R), *more
        if entropy == "metric":
            weights, logits, total_R = weights.detach(), logits.detach(), total_R.detach()
        return logprob_R, total_R.log() - self._sum((weights * logits).sum(-1)) / total_R, *more

    def top_rows(
        self,
        top_k: int,
        vocabulary: int | None,
        hidden_RD: torch.Tensor,
        head_VD: torch.Tensor,
        labels_R: torch.Tensor,
        temperature: float,
        dtype: torch.dtype,
        _entropy: Entropy = "none",
        mask_RK: torch.Tensor | None = None,
        ids_RK: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Return what `top_rows` of hpcrl/trainer/models/logprobs.py does, the same on all ranks of the group; without gradient."""
        whole = self._logits(hidden_RD, head_VD, temperature, dtype)
        logits, _, total_R = self._shifted(whole)
        kept, _, of_kept_R = self._shifted(whole if mask_RK is None else among(whole, mask_RK, self.first))
        logprob_R = self._logprobs(kept, of_kept_R, labels_R[:, None])[:, 0]
        if ids_RK is None:
            end = self.end if vocabulary is None else min(self.end, vocabulary)
            known = torch.arange(self.first, self.first + self.size, device=logits.device) < end
            best = logits.masked_fill(~known, _NOTHING).topk(min(top_k, self.size), -1)
            values, ids = self._gathered(best.values), self._gathered(best.indices + self.first)
            ids_RK = ids.gather(-1, values.topk(top_k, -1).indices)
        return logprob_R, ids_RK, self._logprobs(logits, total_R, ids_RK)

    def _logits(
        self, hidden_RD: torch.Tensor, head_VD: torch.Tensor, temperature: float, dtype: torch.dtype
    ) -> torch.Tensor:
        logits = (linear(hidden_RD, head_VD).to(dtype) / temperature).float()
        if self.first + self.size > self.end:
            padding = torch.arange(self.first, self.first + self.size, device=logits.device) >= self.end
            logits = logits.masked_fill(padding, _NOTHING)
        return logits

    def _shifted(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return logits below the highest of all ranks, their exponentials, and the sum of these over all ranks, [R]."""
        highest_R = logits.detach().amax(-1)
        dist.all_reduce(highest_R, dist.ReduceOp.MAX, self.group)
        logits = logits - highest_R[:, None]
        weights = logits.exp()
        return logits, weights, self._sum(weights.sum(-1))

    def _logprobs(self, logits: torch.Tensor, total_R: torch.Tensor, ids_RK: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities of tokens of any rank, [R, K], from what `_shifted` returns; those of -1 mean nothing."""
        own_RK = ids_RK.long() - self.first
        here_RK = (own_RK >= 0) & (own_RK < self.size)
        found_RK = logits.gather(-1, own_RK.clamp(0, self.size - 1))
        return self._sum(torch.where(here_RK, found_RK, 0.0)) - total_R.log()[:, None]

    def _squared_norms(self, weights: torch.Tensor, total_R: torch.Tensor, labels_R: torch.Tensor) -> torch.Tensor:
        """Return what that of hpcrl/trainer/models/logprobs.py does, from what `_shifted` returns."""
        own = torch.arange(self.first, self.first + self.size, device=weights.device) == labels_R[:, None]
        return self._sum((weights / total_R[:, None] - own.float()).square().sum(-1))

    def _gathered(self, values_RK: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(values_RK) for _ in range(self.group.size())]
        dist.all_gather(parts, values_RK.contiguous(), self.group)
        return torch.cat(parts, -1)

    def _sum(self, values_R: torch.Tensor) -> torch.Tensor:
        # what follows is the same on all ranks, so that each sends its part the whole gradient
        found: Any = reduce_from_tensor_model_parallel_region(values_R, self.group)
        return found
