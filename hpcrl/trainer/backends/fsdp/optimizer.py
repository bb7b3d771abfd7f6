"""Adam, Muon and schedule-free AdamW by the configuration, and loss scaling for float16."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hpcrl.config.sections.model import OptimizerConfig
from hpcrl.trainer.backends.fsdp.muon import Muon, matrices_of
from hpcrl.trainer.backends.fsdp.schedule_free import ScheduleFreeAdamW
from hpcrl.trainer.backends.fsdp.sharding import local
from hpcrl.trainer.models.parameter_groups import ParameterGroup, parameter_groups

_FIRST, _GROWS_AFTER = 2.0**16, 2000


def make_optimizer(model: nn.Module, settings: OptimizerConfig, role: str = "trainer.policy") -> torch.optim.Optimizer:
    """Return the optimizer of a model's trained parameters; role and errors as of `parameter_groups`."""
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    groups = parameter_groups(trained, settings, role)
    if settings.name == "ScheduleFreeAdamW":
        share, second = settings.adam_betas
        return ScheduleFreeAdamW(_groups(groups, trained), settings.lr, (share, second), settings.eps)
    if settings.name != "Muon":
        return make_adam(_groups(groups, trained), settings)
    matrices = matrices_of(model)
    moved = _groups(groups, {name: each for name, each in trained.items() if each in matrices})
    adam = make_adam(_groups(groups, {name: each for name, each in trained.items() if each not in matrices}), settings)
    assert isinstance(adam, torch.optim.Adam), "rules refuse moments of fewer bits"
    return Muon(moved, adam, settings.muon_momentum) if moved else adam


def _groups(groups: list[ParameterGroup], parameters: Mapping[str, nn.Parameter]) -> list[dict[str, Any]]:
    """Return the groups with their parameters among these, as optimizers take them; none that would be empty."""
    found = [
        {
            "params": [each for name, each in parameters.items() if name in group.names],
            "lr_factor": group.lr_factor,
            "weight_decay": group.weight_decay,
        }
        for group in groups
    ]
    return [group for group in found if group["params"]]


def make_adam(groups: list[dict[str, Any]], settings: OptimizerConfig) -> torch.optim.Optimizer:
    """Return Adam by the configuration; low-precision moments are torchao's, which computes in float32.

    Args:
        groups: of parameters; none where Muon moves all.
    """
    options: dict[str, Any] = {"lr": settings.lr, "betas": tuple(settings.adam_betas), "eps": settings.eps}
    if settings.moments is None:
        return torch.optim.Adam(
            groups or [{"params": [], "lr_factor": 1.0}],  # torch refuses a list without groups
            **options,
            decoupled_weight_decay=settings.name != "Adam",
            fused=settings.implementation == "fused",
            foreach=settings.implementation == "foreach",
        )
    from torchao.optim import Adam8bit, AdamW8bit  # pyright: ignore[reportMissingImports]
    from torchao.optim.subclass_8bit import OptimState8bit  # pyright: ignore[reportMissingImports]

    OptimState8bit.implements(torch.ops.aten.zero_.default)(_zero)  # which forget_moments asks for
    optimizer = (AdamW8bit if settings.name == "AdamW" else Adam8bit)(groups, **options)
    for parameter in [
        each for group in groups for each in group["params"]
    ]:  # what it would make itself with the first gradient
        first, second = (
            torch.zeros_like(parameter, dtype=torch.bfloat16, requires_grad=False)
            if settings.moments == "bf16"
            else optimizer._new_buffer(parameter.detach(), signed)
            for signed in (True, False)
        )
        optimizer.state[parameter] = {"step": torch.tensor(0.0), "exp_avg": first, "exp_avg_sq": second}
    return optimizer


def _zero(_func: object, _types: object, args: tuple[Any, ...], _kwargs: object) -> Any:
    args[0].codes.zero_()
    args[0].scale.zero_()
    return args[0]


def make_step(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Make an optimizer step with this learning rate."""
    own = isinstance(optimizer, torch.optim.Adam | Muon | ScheduleFreeAdamW)
    for group in optimizer.param_groups:
        of_group = lr * group["lr_factor"]
        group["lr"] = of_group if own else group["lr"].fill_(of_group)
    # torchao compiles its step, for each shape of a parameter: minutes on a CPU, where there is nothing to win
    on_cpu = optimizer.param_groups[0]["params"][0].device.type == "cpu"
    with nullcontext() if own or not on_cpu else torch.compiler.set_stance("force_eager"):
        optimizer.step()


def numbers(moment: torch.Tensor) -> torch.Tensor:
    """Return a moment as numbers: itself, or its dequantized float32 values, from which `set_numbers` restores the same bits.

    So a checkpoint does not depend on blocks of 256, which another number of ranks would cut elsewhere.
    """
    held = local(moment)
    if not hasattr(held, "codes"):
        return moment
    plain: torch.Tensor = held.dequantize()  # pyright: ignore[reportAttributeAccessIssue]
    if not isinstance(moment, DTensor):
        return plain
    return DTensor.from_local(
        plain,
        moment.device_mesh,
        moment.placements,
        run_check=False,
        shape=moment.shape,
        stride=moment.stride(),
    )


@torch.no_grad()
def set_numbers(moment: torch.Tensor, values: torch.Tensor) -> None:
    """Give a moment the numbers that `numbers` returned, changed since."""
    if values is moment:
        return
    from torchao.optim.quant_utils import quantize_8bit_with_qmap  # pyright: ignore[reportMissingImports]

    held: Any = local(moment)
    plain = local(values)
    blocks = plain.view(len(held.scale), -1)
    # the lowest code stands for less than the highest, so that the largest number of a block is not always its scale, as torchao has it
    lowest, highest = held.qmap.aminmax()
    scale = blocks.amax(1).clamp(min=0) / highest
    if held.signed:
        scale = torch.maximum(scale, blocks.amin(1).clamp(max=0) / lowest)
    held.scale.copy_(scale)
    held.codes.copy_(quantize_8bit_with_qmap((blocks / scale.clamp(min=1e-12)[:, None]).view(plain.shape), held.qmap))


@dataclass
class LossScale:
    """Loss scale: a factor before the backward pass that keeps small gradients from underflow in float16.

    It follows whether gradients are finite, as torch.amp.GradScaler's does, with its values: halved after a step whose gradients are not,
    doubled after 2,000 steps whose gradients were (P. Micikevicius et al., arXiv:1710.03740, section 3.2). Gradients are summed over ranks
    before their norm is taken, so that all ranks see the same.

    Attributes:
        changes: it follows; otherwise it is 1 for good.
        value: a power of two, 1 at least.
        steps: with finite gradients since it changed.
    """

    changes: bool
    value: float = 1.0
    steps: int = 0

    @classmethod
    def of(cls, param_dtype: str) -> LossScale:
        """Return the scale that training in this number type begins with."""
        return cls(True, _FIRST) if param_dtype == "fp16" else cls(False)

    def follow(self, finite: bool) -> None:
        """Update the scale after a step."""
        if not self.changes:
            return
        self.steps = self.steps + 1 if finite else 0
        if not finite:
            self.value = max(1.0, self.value / 2.0)
        elif self.steps == _GROWS_AFTER:
            self.value, self.steps = self.value * 2.0, 0

    def state(self) -> dict[str, torch.Tensor]:
        """Return the state that a checkpoint saves; empty where the scale is constant."""
        return {"loss_scale": torch.tensor([self.value, self.steps])} if self.changes else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        if self.changes:
            value, steps = state["loss_scale"].tolist()
            self.value, self.steps = value, int(steps)
