"""Memory snapshots: which steps have one, what stays, and what is left when memory runs out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hpcrl.rundir.layout import Run
from hpcrl.trainer.profiling.memory import KEPT, memory_recorded


class Counter:
    """Stands in for a GPU's allocator: it notes what it is asked for, and writes how often it has begun to record."""

    def __init__(self, full_disk: bool = False) -> None:
        self.recordings, self._full_disk = 0, full_disk
        self.out_of_memory: Callable[[], object] = lambda: None

    def record(self) -> None:
        self.recordings += 1

    def dump(self, path: Path) -> None:
        if self._full_disk:
            raise OSError(28, "No space left on device")
        path.write_text(str(self.recordings))

    def when_out_of_memory(self, call: Callable[[], object]) -> None:
        self.out_of_memory = call


def test_the_newest_steps_stay_each_with_what_it_allocated_itself(tmp_path: Path) -> None:
    run, allocator = Run(tmp_path), Counter()
    with memory_recorded(run, 2, 1, allocator) as after:
        for step in range(11, 11 + KEPT + 2):
            after(step)
    folder = run.memory_snapshot(2, 1, 1).parent
    found = {path.name: path.read_text() for path in folder.iterdir()}
    assert found == {f"rank-1-s0000{step}.pickle": str(step - 10) for step in range(13, 13 + KEPT)}
    with memory_recorded(run, 10, 1, Counter()) as after:
        after(15)
    kept = [path.name for path in run.memory_snapshots(1)]
    assert kept == [f"rank-1-s0000{step}.pickle" for step in (*range(14, 13 + KEPT), 15)], "attempt 10 comes after 2"


def runs_out(run: Run, allocator: Counter, steps: int) -> None:
    """Train some steps, and find no memory in the next one."""
    with memory_recorded(run, 1, 0, allocator) as after:
        for step in range(1, 1 + steps):
            after(step)
        allocator.out_of_memory()
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_an_error_of_memory_names_the_snapshot_of_its_moment(tmp_path: Path) -> None:
    path = Run(tmp_path).memory_snapshot(1, 0, None)
    with pytest.raises(torch.OutOfMemoryError, match=rf"^CUDA out of memory \(memory snapshot: {path}\)$"):
        runs_out(Run(tmp_path), Counter(), steps=1)
    assert path.read_text() == "2"


def test_a_snapshot_that_cannot_be_written_costs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory$"):
        runs_out(Run(tmp_path), Counter(full_disk=True), steps=1)
    assert caplog.text.count("No space left on device") == 2
