"""Records the steps of a trainer rank by PyTorch's profiler, Nsight Systems and memory snapshots, each where it is asked for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from hpcrl.config.sections.profiler import ProfilerConfig
from hpcrl.observe.timeline import Timeline
from hpcrl.rundir.commit import make_directory
from hpcrl.rundir.layout import Run
from hpcrl.trainer.distributed import World
from hpcrl.trainer.profiling.memory import CudaAllocator, memory_recorded
from hpcrl.trainer.profiling.nsight import PhaseRanges, bracketed

log = logging.getLogger(__name__)


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


@contextmanager
def profiled(config: ProfilerConfig, run: Run, attempt: int, world: World) -> Iterator[Callable[[], None]]:
    """Yield what is to be called after each step. Once the steps to record are over, or training is, their trace is written.

    Steps are counted from where this attempt starts, and each attempt writes files of its own.
    """
    if not config.enable or world.rank not in config.ranks:
        yield lambda: None
        return
    path = run.profile_of(attempt, world.rank)

    def write(finished: profile) -> None:
        if finished.step_num <= config.wait_steps + config.warmup_steps:
            log.warning("no profile: training ended after %d steps, before the first to record", finished.step_num)
            return
        make_directory(path.parent)
        finished.export_chrome_trace(str(path))
        log.info("profile written: %s", path)

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (world.device.type == "cuda")
    with profile(
        activities=activities,
        schedule=schedule(wait=config.wait_steps, warmup=config.warmup_steps, active=config.active_steps, repeat=1),
        on_trace_ready=write,
        record_shapes=config.record_shape,
        profile_memory=config.profile_memory,
        with_stack=config.with_stack,
        with_modules=config.with_modules,
    ) as profiler:
        yield profiler.step
