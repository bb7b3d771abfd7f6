"""What the tests of whole runs share: a small experiment, the command line, and questions to a finished run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hpcrl.data.batch_file import batch_steps, read_batch
from hpcrl.data.group_file import groups_of
from hpcrl.observe.metrics import merged
from hpcrl.observe.timeline import read_spans, shares, steps_of
from hpcrl.rundir.commit import read_json
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import outcome_of
from hpcrl.types import GroupMeta
from tests.processes import command_of, processes_of

HPCRL = str(Path(sys.executable).parent / "hpcrl")

SMALL = [
    "trainer.train_batch_size=8",
    "trainer.policy_mini_batch_size=8",
    "generator.n_samples_per_prompt=4",
    "trainer.eval_interval=2",
    "trainer.ckpt_interval=2",
    "trainer.max_steps=4",
]


def hpcrl(*arguments: str, cwd: Path, timeout: float = 300, program: str = HPCRL) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *arguments], cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False)


def wait_for(condition: Callable[[], object], what: Callable[[], str], seconds: float) -> None:
    asked = time.monotonic()
    deadline = asked + seconds
    while not condition():
        now = time.monotonic()
        assert now < deadline, what()
        time.sleep(max(0.2, 2 * (now - asked)))  # a question to Slurm takes time from those that it waits for
        asked = time.monotonic()


def logs_of(run: Run) -> str:
    """Return the end of every log, for the message of a failed assertion."""
    parts = [f"== {path}\n{path.read_text(errors='replace')[-3000:]}" for path in sorted(run.path.glob("logs/*/*.log"))]
    return "\n".join(parts) or f"no logs in {run.path}"


def finish(run: Run, attempt: int, seconds: float = 240) -> str:
    """Return how an attempt has ended, once it has and nothing of the run is left."""
    wait_for(lambda: outcome_of(run, attempt), lambda: logs_of(run), seconds)
    wait_for(lambda: not processes_of(run), lambda: f"left over: {processes_of(run)}", 30)
    outcome = outcome_of(run, attempt)
    assert outcome is not None
    return outcome.kind


def pid_of(run: Run, job: str) -> int:
    """Return the process that runs jobs/<job>.py for this run, not torchrun above it."""
    script = f"{run.path}/code/jobs/{job}.py"
    for pid in processes_of(run):
        words = command_of(pid).split()
        if script in words and "torch.distributed.run" not in words:
            return pid
    raise AssertionError(f"no process runs {job}.py of {run.path}")


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def trained_groups(run: Run) -> list[list[str]]:
    """Return the group ids of each batch, by step."""
    files = [read_batch(run.batch(step)) for step in batch_steps(run)]
    return [[group.group_id for group in file.batch.groups] for file in files if file]


def groups_in(run: Run) -> list[tuple[Path, GroupMeta]]:
    """Return the groups whose samples are there, each with its file."""
    return [(path, group) for path in sorted(run.samples.rglob("*.safetensors")) for group in groups_of(path)]


def curve(run: Run, name: str) -> dict[int, float]:
    return {step: metrics[name] for step, metrics in sorted(merged(run).items()) if name in metrics}


def roles_of_steps(run: Run, steps: int) -> set[str]:
    """Return the processes whose timelines cover every step but the first of three or more, in which scorers may still load, and the last, after a
    look whether their shares of each add up to the whole."""
    spans = read_spans(run)
    found = steps_of(spans)
    assert list(found) == list(range(1, steps + 1))
    of_steps = [shares(spans, *times) for times in found.values()]
    for processes in of_steps:
        assert [sum(parts.values()) for parts in processes.values()] == pytest.approx([1] * len(processes))
        assert processes["rank-0"]["policy_train"] > 0
    whole = of_steps[1:-1] or of_steps[:-1]
    return {process for process in whole[0] if all("absent" not in each[process] for each in whole)}


def eval_score(run: Run, version: int) -> float:
    summary = read_json(run.evals_of(version) / "summary.json")
    assert summary is not None, f"version {version} was not evaluated"
    return summary["eval/all/avg_score"]


def stopped_and_resumed(place: Path, config: Path, project: str, settings: Sequence[str], steps: int) -> Run:
    """Cancel a run once it has trained some steps, as a preemption would, and resume it: each step is trained once. Return it."""
    done = hpcrl("submit", str(config), "--local", "trainer.run_name=stopped", *settings, cwd=place)
    assert done.returncode == 0, done.stderr
    run = Run.open(place / "runs" / project / "stopped")
    wait_for(lambda: len(curve(run, "policy/final_loss")) >= 3, lambda: logs_of(run), 300)
    assert hpcrl("cancel", str(run.path), cwd=place).returncode == 0  # saves and stops, as Slurm's signal makes it do
    finish(run, 1)
    assert hpcrl("resume", str(run.path), cwd=place).returncode == 0
    assert finish(run, 2, 400) == "done"
    assert sorted(curve(run, "policy/final_loss")) == list(range(1, steps + 1))
    return run
