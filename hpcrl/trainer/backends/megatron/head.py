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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probabilities of the labels and entropies, [R] float32 each, the same on all ranks of the group.

        Args:
            head_VD: this rank's rows.
            dtype: to which logits are rounded; what follows is float32.
            mask_RK: sampling masks, as of token_logprobs.
            ids_RK: None: the rules refuse what would ask for other tokens.
        """
        assert ids_RK is None, "log-probabilities of other tokens than the labels"
        logits = (linear(hidden_RD, head_VD).to(dtype) / temperature).float()
        if self.first + self.size > self.end:
            padding = torch.arange(self.first, self.first + self.size, device=logits.device) >= self.end
            logits = logits.masked_fill(padding, _NOTHING)
        if mask_RK is not None:
            logits = among(logits, mask_RK, self.first)
        highest_R = logits.detach().amax(-1)
        dist.all_reduce(highest_R, dist.ReduceOp.MAX, self.group)
        logits = logits - highest_R[:, None]
        weights = logits.exp()
        total_R = self._sum(weights.sum(-1))
        own_R = labels_R - self.first
        here_R = (own_R >= 0) & (own_R < self.size)
        label_R = logits.gather(-1, own_R.clamp(0, self.size - 1)[:, None])[:, 0]
        logprob_R = self._sum(torch.where(here_R, label_R, 0.0)) - total_R.log()
        if entropy == "none":
            return logprob_R, logprob_R.new_zeros(len(logprob_R))
        if entropy == "metric":
            weights, logits, total_R = weights.detach(), logits.detach(), total_R.detach()
        return logprob_R, total_R.log() - self._sum((weights * logits).sum(-1)) / total_R

    def _sum(self, values_R: torch.Tensor) -> torch.Tensor:
        # what follows is the same on all ranks, so that each sends its part the whole gradient
        found: Any = reduce_from_tensor_model_parallel_region(values_R, self.group)
        return found
