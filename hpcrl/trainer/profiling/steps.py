"""All that records the steps of a trainer rank: PyTorch's profiler, Nsight Systems, memory snapshots; each where it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from hpcrl.config.sections.trainer import ProfilerConfig
from hpcrl.observe.timeline import Timeline
from hpcrl.rundir.layout import Run
from hpcrl.trainer.distributed import World
from hpcrl.trainer.profiling.memory import CudaAllocator, memory_recorded
from hpcrl.trainer.profiling.nsight import PhaseRanges, bracketed
from hpcrl.trainer.profiling.trace import profiled


@contextmanager
def recorded(
    config: ProfilerConfig, record_memory: bool, run: Run, attempt: int, world: World, timeline: Timeline
) -> Iterator[Callable[[int], None]]:
    """Yield what is to be called after each step, with its number.

    Args:
        record_memory: trainer.policy.record_memory; every rank records.
    """
    with ExitStack() as stack:
        after = [stack.enter_context(profiled(config, run, attempt, world))]
        if config.enable_nsys and world.rank in config.ranks:
            timeline.follow(PhaseRanges(torch.cuda.nvtx))
            after.append(stack.enter_context(bracketed(config, torch.cuda.profiler.start, torch.cuda.profiler.stop)))
        snapshot = (
            stack.enter_context(memory_recorded(run, attempt, world.rank, CudaAllocator())) if record_memory else None
        )

        def stepped(step: int) -> None:
            for each in after:
                each()
            if snapshot:
                snapshot(step)

        yield stepped
