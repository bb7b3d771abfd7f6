"""Snapshots of a rank's GPU memory: what was allocated in a step, by which line of Python, for https://pytorch.org/memory_viz."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch

from hpcrl.rundir.commit import make_directory
from hpcrl.rundir.layout import Run

log = logging.getLogger(__name__)

KEPT = 4
"""Snapshots of steps that stay of a rank, the newest, over all attempts; those of running out of memory are kept beside them."""

_EVENTS = 100_000  # newest allocations and frees that a snapshot has; each takes some hundred bytes


class Allocator(Protocol):
    """Memory statistics of a device's allocator."""

    def record(self) -> None:
        """Note from now on which lines allocate, and forget what was noted before."""
        ...

    def dump(self, path: Path) -> None: ...

    def when_out_of_memory(self, call: Callable[[], object]) -> None:
        """Call this at the moment at which an allocation fails, before its error is raised and frees what it passes."""
        ...


class CudaAllocator:
    """PyTorch's caching allocator (https://docs.pytorch.org/docs/stable/torch_cuda_memory.html)."""

    def record(self) -> None:
        torch.cuda.memory._record_memory_history(max_entries=_EVENTS, stacks="python", clear_history=True)

    def dump(self, path: Path) -> None:
        torch.cuda.memory._dump_snapshot(str(path))

    def when_out_of_memory(self, call: Callable[[], object]) -> None:
        torch._C._cuda_attach_out_of_memory_observer(lambda *_: call())  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def memory_recorded(run: Run, attempt: int, rank: int, allocator: Allocator) -> Iterator[Callable[[int], None]]:
    """Yield what is to be called after each step, with its number: it writes what was allocated in that step, and removes older files,
    those of earlier attempts first.

    Where memory runs out, what was allocated then is written too, and the error names the file.
    """
    at_the_end, written = run.memory_snapshot(attempt, rank, None), run.memory_snapshots(rank)

    def after(step: int) -> None:
        path = run.memory_snapshot(attempt, rank, step)
        if _dumped(allocator, path):
            written.append(path)
        while len(written) > KEPT:
            written.pop(0).unlink(missing_ok=True)
        allocator.record()

    allocator.record()
    allocator.when_out_of_memory(lambda: _dumped(allocator, at_the_end))
    try:
        yield after
    except torch.OutOfMemoryError as error:
        if at_the_end.exists():
            error.args = (f"{error} (memory snapshot: {at_the_end})",)
        raise


def _dumped(allocator: Allocator, path: Path) -> bool:
    """Write a snapshot, complete or not at all; return whether that worked. One that cannot be written is not worth an attempt."""
    passing = path.with_suffix(".tmp")
    try:
        make_directory(path.parent)
        allocator.dump(passing)
        os.replace(passing, path)
    except OSError as error:
        log.warning("no memory snapshot at %s: %s", path, error)
        return False
    log.info("memory snapshot written: %s", path)
    return True
