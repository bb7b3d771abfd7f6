"""Nsight Systems in a trainer rank: recorded steps, and the phases of the timeline as NVTX ranges.

The agent starts the rank under `nsys profile` (hpcrl/launch/agent/nsight.py), which records between start and stop of CUDA's profiler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from hpcrl.config.sections.profiler import ProfilerConfig


class Nvtx(Protocol):
    """The part of torch.cuda.nvtx that shows ranges of a process, whichever of its threads begins and ends them."""

    def range_start(self, msg: str) -> int: ...
    def range_end(self, range_id: int) -> None: ...


class PhaseRanges:
    """Shows what a timeline notes: a range per step, and in it one per phase, under the timeline's names. A follower of `Timeline`."""

    def __init__(self, nvtx: Nvtx) -> None:
        self._nvtx, self._step = nvtx, None
        self._of_step: int | None = None
        self._of_phase: int | None = None

    def __call__(self, phase: str, step: int | None) -> None:
        if self._of_phase is not None:
            self._nvtx.range_end(self._of_phase)
        if step != self._step:
            if self._of_step is not None:
                self._nvtx.range_end(self._of_step)
            self._step, self._of_step = step, None if step is None else self._nvtx.range_start(f"step {step}")
        self._of_phase = self._nvtx.range_start(phase)


@contextmanager
def bracketed(
    config: ProfilerConfig, start: Callable[[], object], stop: Callable[[], object]
) -> Iterator[Callable[[], None]]:
    """Yield what is to be called after each step: it calls `start` before the first step to record and `stop` after the last one.

    Where training ends between them, `stop` is called then.
    """
    first, done = config.wait_steps + config.warmup_steps, 0
    last = first + config.active_steps
    if first == 0:
        start()

    def after() -> None:
        nonlocal done
        done += 1
        if done == first:
            start()
        elif done == last:
            stop()

    try:
        yield after
    finally:
        if first <= done < last:
            stop()
