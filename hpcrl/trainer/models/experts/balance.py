"""How evenly the routers of a mixture use its experts: two losses, and what is reported.

Both losses are means over the tokens of a sample, and then over the samples of a mini-batch, so that neither depends on how samples are
packed or on how many ranks there are. Those of the layers are added.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

AUX_LOSS, Z_LOSS = "experts/aux_loss", "experts/z_loss"


@dataclass(frozen=True)
class Samples:
    """Whose tokens a pass has: B samples of P tokens, of which routers see N, each once, and maybe padding.

    Attributes:
        owners: [P] int64, the sample of each token.
        lengths: [B] float32.
        spread: [P, ...] of [N, ...].
        share: of a sample in the mini-batch; 0: it is none.
    """

    owners: torch.Tensor
    lengths: torch.Tensor
    spread: Callable[[torch.Tensor], torch.Tensor]
    share: float

    def sums(self, values_P: torch.Tensor) -> torch.Tensor:
        """Return [B, ...]: the sum over the tokens of each sample."""
        sums_B = values_P.new_zeros(len(self.lengths), *values_P.shape[1:])
        return sums_B.index_add(0, self.owners, values_P)

    def chosen(self, experts_Nk: torch.Tensor, count: int) -> torch.Tensor:
        """Return how many tokens of each sample go to each of `count` experts, [B, E] float32."""
        experts_Pk = self.spread(experts_Nk)
        places = (self.owners[:, None] * count + experts_Pk).flatten()
        counts = torch.zeros(len(self.lengths) * count, device=places.device)
        return counts.index_add_(0, places, torch.ones_like(places, dtype=counts.dtype)).view(-1, count)


def aux_loss(probabilities_NE: torch.Tensor, chosen_BE: torch.Tensor, samples: Samples) -> torch.Tensor:
    """Return the load-balancing loss of each sample, [B]: E sum_i f_i P_i, which is 1 where all experts are used alike.

    f_i is the share of the sample's choices that fall on expert i, P_i the mean of the router's probability for it (Switch Transformer,
    arXiv:2101.03961, equations 4 to 6; with k experts per token and per sequence as in DeepSeek-V3, arXiv:2412.19437, equations 17 to 20).
    No gradient reaches f.
    """
    shares_BE = chosen_BE / chosen_BE.sum(-1, keepdim=True)
    means_BE = samples.sums(samples.spread(probabilities_NE)) / samples.lengths[:, None]
    return chosen_BE.shape[1] * (shares_BE * means_BE).sum(-1)


def z_loss(logits_NE: torch.Tensor, samples: Samples) -> torch.Tensor:
    """Return the mean square of the log of the router's partition function of each sample, [B] (ST-MoE, arXiv:2202.08906, equation 5)."""
    squares_P = samples.spread(logits_NE.logsumexp(-1).square())
    return samples.sums(squares_P) / samples.lengths


def describe_balance(chosen_LE: torch.Tensor, entropies_L: torch.Tensor, tokens: float) -> dict[str, float]:
    """Return metrics of a mini-batch.

    Args:
        chosen_LE: how many tokens went to each expert of each layer.
        entropies_L: of the probabilities of each layer's router in nats, added over tokens.
        tokens: of all samples.
    """
    loads_L = chosen_LE.amax(-1) / chosen_LE.mean(-1).clamp(min=1e-9)
    return {
        "experts/load": loads_L.mean().item(),
        "experts/load_max": loads_L.amax().item(),
        "experts/idle_share": (chosen_LE == 0).double().mean().item(),
        "experts/router_entropy": entropies_L.mean().item() / max(tokens, 1.0),
    }
