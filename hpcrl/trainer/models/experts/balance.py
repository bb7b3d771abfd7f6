"""Load balance of the experts of a mixture: two losses, and metrics.

Both losses are means over the tokens of a sample, and then over the samples of a mini-batch. So neither depends on packing or on the
number of ranks. Those of the layers are added.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hpcrl.config.sections.model import ExpertsConfig
from hpcrl.trainer.distributed import World

AUX_LOSS, Z_LOSS = "experts/aux_loss", "experts/z_loss"
_TOKENS, _ENTROPY, _AUX, _Z, _GIVEN = range(5)  # metrics of a layer beside the tokens of each expert


@dataclass(frozen=True)
class Samples:
    """Sample of each token that a router sees: N of the P tokens of B samples, each once, and maybe padding.

    Attributes:
        owners: [P] int64, the sample of each token; B: it is padding.
        lengths: [B] float32.
        share: of a sample in the mini-batch.
        spread: [P, ...] of [N, ...].
        group: ranks that share the tokens of these samples; None: this one has all of them.
    """

    owners: torch.Tensor
    lengths: torch.Tensor
    share: float
    spread: Callable[[torch.Tensor], torch.Tensor] = lambda values_N: values_N
    group: dist.ProcessGroup | None = None

    def sums(self, values_N: torch.Tensor) -> torch.Tensor:
        """Return [B, ...]: sums over this rank's tokens of each sample."""
        count = len(self.lengths)
        sums_B = values_N.new_zeros(count + 1, *values_N.shape[1:])
        return sums_B.index_add(0, self.owners, self.spread(values_N))[:count]

    def over_ranks(self, sums_B: torch.Tensor) -> torch.Tensor:
        """Return what is added up over the ranks that share the samples."""
        if self.group is not None and self.group.size() > 1:
            dist.all_reduce(sums_B, group=self.group)
        return sums_B


def aux_loss(probabilities_NE: torch.Tensor, chosen_BE: torch.Tensor, samples: Samples) -> torch.Tensor:
    """Return this rank's part of the load-balancing loss of each sample, [B]: E sum_i f_i P_i, which is 1 where all experts are used alike.

    f_i is the share of the sample's choices that fall on expert i, P_i the mean of the router's probability for it (Switch Transformer,
    arXiv:2101.03961, equations 4 to 6). With k experts per token and per sequence it is DeepSeek-V3's (arXiv:2412.19437, equations 17 to
    20). No gradient reaches f.

    Args:
        chosen_BE: tokens of each sample that go to each expert, on all ranks.
    """
    shares_BE = chosen_BE / chosen_BE.sum(-1, keepdim=True).clamp(min=1)
    means_BE = samples.sums(probabilities_NE) / samples.lengths[:, None]
    return chosen_BE.shape[1] * (shares_BE * means_BE).sum(-1)


def z_loss(logits_NE: torch.Tensor, samples: Samples) -> torch.Tensor:
    """Return this rank's part of the mean square of the log of the router's partition function of each sample, [B] (ST-MoE, arXiv:2202.08906, equation 5)."""
    return samples.sums(logits_NE.logsumexp(-1).square()) / samples.lengths


class Balance:
    """Losses and metrics of the routers of a model.

    Args:
        layers, experts: L layers that have routers, each over E experts.
        chosen: experts that each token goes to.
        drops: some tokens do not reach experts that have too many.
    """

    def __init__(self, config: ExpertsConfig, layers: int, experts: int, chosen: int, *, drops: bool = False) -> None:
        self.layers, self._experts, self._chosen, self._drops = layers, experts, chosen, drops
        self._config = config
        self._told: torch.Tensor | None = None

    def with_loss(
        self,
        layer: int,
        scores: torch.Tensor,
        logits_NE: torch.Tensor,
        chosen_NE: torch.Tensor,
        samples: Samples,
        *,
        given_Nk: torch.Tensor | None,
        scale: float,
        told: bool,
    ) -> torch.Tensor:
        """Return the scores of a layer's experts, whose gradient now has that of its losses too.

        Args:
            chosen_NE: 1 where a token goes to an expert, else 0; float32.
            given_Nk: the experts that were chosen before, -1 where they were not; None: nowhere.
            scale: of the gradient.
            told: it is noted what the layer does.
        """
        logits_NE = logits_NE.float()
        probabilities_NE, chosen_BE = logits_NE.softmax(-1), samples.sums(chosen_NE)
        noted, losses, config = logits_NE.new_zeros(5), list[torch.Tensor](), self._config
        if config.aux_loss_coef:
            everywhere_BE = samples.over_ranks(chosen_BE.clone())
            cost = samples.share * aux_loss(probabilities_NE, everywhere_BE, samples).sum()
            losses.append(config.aux_loss_coef * cost)
            noted[_AUX] = cost.detach()
        if config.z_loss_coef:
            cost = samples.share * z_loss(logits_NE, samples).sum()
            losses.append(config.z_loss_coef * cost)
            noted[_Z] = cost.detach()
        if told:
            entropies_N = torch.special.entr(probabilities_NE.detach()).sum(-1)
            noted[_TOKENS] = samples.sums(torch.ones_like(entropies_N)).sum()
            noted[_ENTROPY] = samples.sums(entropies_N).sum()
            if given_Nk is not None:
                noted[_GIVEN] = samples.sums((given_Nk[:, 0] >= 0).float()).sum()
            self._note(layer, torch.cat([chosen_BE.sum(0), noted]))
        if not losses:
            return scores
        found: Any = _WithLoss.apply(scores, scale * torch.stack(losses).sum())
        return found

    def _note(self, layer: int, noted: torch.Tensor) -> None:
        if self._told is None:  # on the device, so that the host need not wait
            self._told = torch.zeros(self.layers, self._experts + 5, dtype=torch.float64, device=noted.device)
        self._told[layer] += noted

    def forget(self) -> None:
        """Reset the metrics."""
        self._told = None

    def metrics(self, world: World) -> dict[str, float]:
        """Return the metrics since the last call, over all of these ranks, each of which calls it; empty: there are none."""
        told = [0.0] * (self.layers * (self._experts + 5)) if self._told is None else self._told.flatten().tolist()
        self.forget()
        return self._described(world.sum(told)) if self.layers else {}

    def _described(self, told: list[float]) -> dict[str, float]:
        sums_L = torch.tensor(told, dtype=torch.float64).view(self.layers, self._experts + 5)
        chosen_LE, others_L = sums_L[:, : self._experts], sums_L[:, self._experts :]
        tokens_L = others_L[:, _TOKENS]
        if not len(tokens_L) or not tokens_L.min():
            return {}
        loads_L = chosen_LE.amax(-1) / chosen_LE.mean(-1)
        found = {
            "experts/load": loads_L.mean(),
            "experts/load_max": loads_L.amax(),
            "experts/idle_share": (chosen_LE == 0).double().mean(),
            "experts/router_entropy": (others_L[:, _ENTROPY] / tokens_L).mean(),
        }
        if self._config.aux_loss_coef:
            found[AUX_LOSS] = others_L[:, _AUX].mean()
        if self._config.z_loss_coef:
            found[Z_LOSS] = others_L[:, _Z].mean()
        if self._config.router_replay != "none":
            found["experts/replayed_share"] = others_L[:, _GIVEN].sum() / tokens_L.sum()
        if self._drops:
            found["experts/dropped_share"] = 1 - chosen_LE.sum() / (self._chosen * tokens_L.sum())
        return {name: value.item() for name, value in found.items()}


class _WithLoss(torch.autograd.Function):
    """Attaches a loss to these values: its gradient joins theirs, also where a layer is recomputed."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.of_loss = loss.dtype, loss.device
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        dtype, device = ctx.of_loss
        return gradient, torch.ones((), dtype=dtype, device=device)
