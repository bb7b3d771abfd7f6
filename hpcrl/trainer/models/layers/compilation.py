"""Whether torch.compile is used where the configuration leaves it open: on GPUs, for what it was measured with, where a compiler works."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
from torch._dynamo.exc import TorchDynamoException

from hpcrl.config.sections.trainer import TrainerConfig
from hpcrl.trainer.distributed import World
from hpcrl.trainer.models.hf import policy_source

log = logging.getLogger(__name__)

_SETTINGS = "compile_model", "use_torch_compile"
_PLAIN = {"llama", "mistral", "qwen2", "qwen3"}
"""Model types whose layers are attention and a gated MLP, and nothing else."""


def with_compilation(trainer: TrainerConfig, world: World) -> TrainerConfig:
    """Return the section with `compile_model` and `use_torch_compile` set, the same on every rank. All ranks call it.

    Where both are left open and this turns them on, code that torch cannot compile later runs eagerly: a frame is compiled before any of it
    has run, so ranks need not agree on that. What is set to true raises torch's error instead.

    Raises:
        DataError: the policy's path holds no model.
    """
    policy = trainer.policy
    unset = [name for name in _SETTINGS if getattr(policy, name) is None]
    if not unset:
        return trainer
    compiles = (
        world.device.type == "cuda"
        and _measured(trainer)
        and world.rank0_broadcast(lambda: policy_source(trainer).config().model_type in _PLAIN)
        and compiler_works(world)
    )
    if compiles and len(unset) == len(_SETTINGS):
        fall_back_to_eager()
    return replace(trainer, policy=replace(policy, **dict.fromkeys(unset, compiles)))


def _measured(trainer: TrainerConfig) -> bool:
    policy, fsdp = trainer.policy, trainer.policy.fsdp_config
    others = (
        trainer.shared_prefixes,
        trainer.gradient_checkpointing_use_reentrant,
        trainer.gradient_checkpointing_keep != "nothing",
        policy.activation_offload,
        policy.enable_liger_kernel,
        policy.low_precision.fp8,
        policy.sequence_parallel_size > 1,
        fsdp.cpu_offload,
    )
    return (
        not any(others)
        and trainer.use_sample_packing
        and trainer.flash_attn
        and fsdp.mixed_precision.param_dtype == "bf16"
    )


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
