"""The reference follows the policy: when, and what of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from hpcrl.config.sections.trainer import TrainerConfig
from hpcrl.errors import DataError

REFERENCE = "reference"  # folder of a checkpoint


def reset_is_due(step: int, steps_per_epoch: int, trainer: TrainerConfig) -> bool:
    """Return whether the policy after `step` becomes the reference (reference_reset_interval, update_ref_every_epoch)."""
    interval = trainer.algorithm.reference_reset_interval
    if interval is not None:
        return step % interval == 0
    return trainer.update_ref_every_epoch and step % steps_per_epoch == 0


def resets_optimizer(trainer: TrainerConfig) -> bool:
    """Return whether the optimizer starts afresh with the reference; one that follows each epoch leaves it alone, as SkyRL's."""
    algorithm = trainer.algorithm
    return algorithm.reference_reset_interval is not None and algorithm.reset_optimizer_with_reference


def require_same_shape(reference: nn.Module, policy: nn.Module) -> None:
    """Raise DataError unless the reference can become the policy."""
    shapes = [{name: p.shape for name, p in module.named_parameters()} for module in (reference, policy)]
    if shapes[0] != shapes[1]:
        raise DataError(
            "trainer.ref.model.path: the reference has other parameters than the policy, so it cannot follow it, as "
            "trainer.algorithm.reference_reset_interval, trainer.update_ref_every_epoch or the checkpoint want; name a model of the "
            "same shape, or leave it out"
        )


def forget_moments(optimizer: torch.optim.Optimizer) -> None:
    """Bring Adam to where it was before its first step."""
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()


@contextmanager
def exchanged(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
    """Let the tensors of each pair have each other's values for a while."""
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
