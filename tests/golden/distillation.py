"""Log-probabilities of several tokens at each position, as Cosmos-RL's golden cases have them: whole logits in memory."""

from __future__ import annotations

import torch

from hpcrl.algorithms.losses import widened


def selected_logprobs(logits_PV: torch.Tensor, ids_PK: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of K tokens at each position, [P, K], differentiable."""
    logits_PV = widened(logits_PV)
    return logits_PV.gather(-1, ids_PK) - logits_PV.logsumexp(-1, keepdim=True)
