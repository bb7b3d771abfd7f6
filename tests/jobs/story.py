"""What the tests of whole runs share: a small experiment, the command line, and questions to a finished run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from hpcrl.observe.metrics import merged
from hpcrl.rundir.commit import read_json
from hpcrl.rundir.layout import Run
from hpcrl.types import Batch

HPCRL = str(Path(sys.executable).parent / "hpcrl")

SMALL = [
    "trainer.train_batch_size=8",
    "trainer.policy_mini_batch_size=8",
    "generator.n_samples_per_prompt=4",
    "trainer.eval_interval=2",
    "trainer.ckpt_interval=2",
    "trainer.max_steps=4",
]


def hpcrl(*arguments: str, cwd: Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run([HPCRL, *arguments], cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False)


def wait_for(condition: Callable[[], object], what: Callable[[], str], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.2)


def logs_of(run: Run) -> str:
    """Return the end of every log, for the message of a failed assertion."""
    parts = [f"== {path}\n{path.read_text(errors='replace')[-3000:]}" for path in sorted(run.path.glob("logs/*/*.log"))]
    return "\n".join(parts) or f"no logs in {run.path}"


def processes_of(run: Run) -> list[int]:
    """Return the processes whose command line or environment names this run directory."""
    needle, found = str(run.path).encode(), []
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit() or int(directory.name) == os.getpid():
            continue
        try:
            if needle in (directory / "cmdline").read_bytes():
                found.append(int(directory.name))
        except OSError:
            continue
    return found


def pid_of(run: Run, job: str) -> int:
    """Return the process that runs jobs/<job>.py for this run, not torchrun above it."""
    script = f"{run.path}/code/jobs/{job}.py".encode()
    for pid in processes_of(run):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if script in words and b"torch.distributed.run" not in words:
            return pid
    raise AssertionError(f"no process runs {job}.py of {run.path}")


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def trained_groups(run: Run) -> list[list[str]]:
    """Return the group ids of each batch, by step."""
    return [
        [group.group_id for group in Batch.from_json(read_json(path)).groups]
        for path in sorted(run.batches.glob("s*.json"))
    ]


def curve(run: Run, name: str) -> dict[int, float]:
    return {step: metrics[name] for step, metrics in sorted(merged(run).items()) if name in metrics}
