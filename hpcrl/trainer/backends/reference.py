"""Updates of the reference model from the policy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from hpcrl.errors import DataError

REFERENCE = "reference"  # folder of a checkpoint
_MOMENTS = {
    "exp_avg",
    "exp_avg_sq",
    "step",
    "momentum_buffer",
}  # Megatron-core keeps weights of float32 beside them, as master_param


def require_same_shape(reference: nn.Module, policy: nn.Module) -> None:
    """Raise DataError unless the reference can become the policy."""
    shapes = [{name: p.shape for name, p in module.named_parameters()} for module in (reference, policy)]
    if shapes[0] != shapes[1]:
        raise DataError(
            "trainer.ref.model.path: the reference has other parameters than the policy and cannot follow it, as "
            "trainer.algorithm.reference_reset_interval, trainer.update_ref_every_epoch or the checkpoint want. Name a model of the "
            "same shape, or leave it out"
        )


def forget_moments(optimizer: torch.optim.Optimizer) -> None:
    """Reset an optimizer to its state before the first step."""
    for state in optimizer.state.values():
        for name in _MOMENTS & state.keys():
            state[name].zero_()
    for group in optimizer.param_groups:
        if "step" in group:  # TransformerEngine counts there
            group["step"] *= 0


@contextmanager
def exchanged(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
    """Swap the values of each pair of tensors for a while."""
    pairs = list(pairs)

    @torch.no_grad()
    def exchange() -> None:
        for one, other in pairs:
            held = one.clone()
            one.copy_(other)
            other.copy_(held)

    exchange()
    try:
        yield
    finally:
        exchange()
