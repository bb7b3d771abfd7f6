"""Section `trainer.profiler`: which steps of which trainer ranks are profiled."""

from __future__ import annotations

from dataclasses import dataclass

from hpcrl.config.setting import COUNT, NOT_NEGATIVE, setting


@dataclass(frozen=True, kw_only=True)
class ProfilerConfig:
    enable: bool = False
    """Record a PyTorch profile of the trainer into profile/ of the run directory, for chrome://tracing or Perfetto."""

    enable_nsys: bool = False
    """Record those steps with Nsight Systems instead, whose `nsys` has to be on the PATH of the nodes: the trainer's ranks are started under it, and phases are NVTX ranges."""

    nsys_engine_iterations: int = setting(0, range=NOT_NEGATIVE)
    """With enable_nsys: iterations of each vLLM engine that are recorded too, after its first 100; 0: engines are not started under it."""

    wait_steps: int = setting(1, range=NOT_NEGATIVE)
    """Steps that are skipped first; counted from where an attempt starts."""

    warmup_steps: int = setting(1, range=NOT_NEGATIVE)
    """Steps that warm the profiler up."""

    active_steps: int = setting(1, range=COUNT)
    """Steps that are recorded."""

    ranks: list[int] = setting(
        [0], why="a profile of no rank would be empty; SkyRL's megatron_config.torch_profiler_config.ranks is []"
    )
    """Ranks that record."""

    record_shape: bool = False
    """Record the shapes of tensors."""

    profile_memory: bool = False
    """Record allocations."""

    with_stack: bool = False
    """Record Python stacks."""

    with_modules: bool = False
    """Record which module each operation belongs to."""
