"""Schedule-free AdamW: gradients are taken at one sequence of weights, and an average of another is evaluated (A. Defazio et al., arXiv:2405.15682).

With beta the first of Adam's decay rates, weights y that are trained, z that gradients move, and their average x:

    z' = z - lr (g / (sqrt(v') + eps) + decay y)      g the gradient at y, v' its second moment, as Adam corrects its bias
    x' = (1 - c) x + c z'                             c = lr² / sum of lr² up to this step
    y' = (1 - beta) z' + beta x'

A parameter is y, its state has z, and x = (y - (1 - beta) z) / beta. The bias correction is that of the authors' later code, as the paper's
also scales the weights of the average.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hpcrl.trainer.backends.fsdp.sharding import local


class ScheduleFreeAdamW(torch.optim.Optimizer):
    """Schedule-free AdamW, whose learning rate the caller sets at each step.

    Args:
        groups: of parameters, with weight decays; they may be sharded.
        betas: share of the average in the trained weights, above 0, and decay rate of the second moment.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        for each in (each for group in self.param_groups for each in group["params"]):
            self.state[each] = {
                "step": torch.zeros(()),
                "weight_sum": torch.zeros((), dtype=torch.float64),
                "z": each.detach().clone(),
                "exp_avg_sq": torch.zeros_like(each, requires_grad=False),
            }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # noqa: ARG002  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    self._move(each, group)

    def _move(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state, lr, (beta, second) = self.state[parameter], group["lr"], group["betas"]
        assert parameter.grad is not None
        y, z, moment, change = (local(each) for each in (parameter, state["z"], state["exp_avg_sq"], parameter.grad))
        state["step"] += 1
        state["weight_sum"] += lr**2
        share = lr**2 / state["weight_sum"].item() if lr else 0.0
        moment.mul_(second).addcmul_(change, change, value=1 - second)
        # in place: the gradient becomes the change, so that a step takes the memory of one more tensor only
        change.div_((moment / (1 - second ** state["step"].item())).sqrt_().add_(group["eps"]))
        change.add_(y, alpha=group["weight_decay"])
        y.lerp_(z, share).add_(change, alpha=-lr * (1 - beta * (1 - share)))
        z.add_(change, alpha=-lr)

    @torch.no_grad()
    def restart(self) -> None:
        """Begin again as a new optimizer would, with the averages for weights."""
        for parameter, state in self.state.items():
            average = self.average(parameter)
            for each in (parameter, state["z"]):
                local(each).copy_(average)
            for name in ("step", "weight_sum", "exp_avg_sq"):
                state[name].zero_()

    @torch.no_grad()
    def average(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of x, the average that is evaluated and exported."""
        return torch.lerp(local(self.state[parameter]["z"]), local(parameter), 1 / self.defaults["betas"][0])
