"""Whether a compiler works for torch.compile, and eager code where it does not."""

from __future__ import annotations

import logging

import torch
from torch._dynamo.exc import TorchDynamoException

from hpcrl.trainer.distributed import World

log = logging.getLogger(__name__)


def compiler_works(world: World) -> bool:
    """Return whether torch compiles a small function, forward and backward, on every rank; rank 0 logs why not. All ranks call it."""
    reasons = world.all_gather(lambda: _failure(world.device))
    failed = [rank for rank, reason in enumerate(reasons) if reason]
    if failed and world.first:
        log.warning(
            "torch.compile fails on %d of %d ranks (rank %d: %s), so all compute without it; trainer.policy.compile_model=true makes this an error",
            len(failed), world.size, failed[0], reasons[failed[0]],
        )  # fmt: skip
    return not failed


def _failure(device: torch.device) -> str | None:
    numbers = torch.ones(64, device=device, requires_grad=True)
    try:
        torch.compile(_small)(numbers).backward()
    except TorchDynamoException as error:
        return _in_one_line(error)
    return None


def _small(numbers: torch.Tensor) -> torch.Tensor:
    return (torch.nn.functional.silu(numbers) * numbers).sum()


def _in_one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def fall_back_to_eager() -> None:
    """Let code that torch cannot compile run eagerly in this process, with one warning in place of torch's for each frame."""
    torch._dynamo.config.suppress_errors = True
    logging.getLogger("torch._dynamo.convert_frame").addFilter(_Once())


class _Once(logging.Filter):
    told = False

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return True
        if not self.told:
            self.told = True
            log.warning(
                "torch.compile failed, and this code runs without it: %s; trainer.policy.compile_model=true makes this an error",
                _in_one_line(error),
            )
        return False
