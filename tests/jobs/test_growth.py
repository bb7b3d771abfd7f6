"""A run of 10,000 steps, twice preempted: what its processes hold stays what it was, and its directory grows as docs/operations.md says.

`make soak`; HPCRL_GROWTH=2500 for as many steps. The rows of the tables are printed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from hpcrl.launch.manage.registry import states_of
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import outcome_of
from tests.jobs.growth import Measurement, folders_of, measure
from tests.jobs.long_history import TASKS, cost, write_long_run
from tests.jobs.small_run import HPCRL, hpcrl, logs_of, trained_groups, wait_for
from tests.paths import QUICKSTART
from tests.processes import processes_of

STEPS = int(os.environ.get("HPCRL_GROWTH", "10000"))
PREEMPTED_AFTER = (STEPS // 20, STEPS // 10)
STEADY_FROM = STEPS // 5
GROUPS, SAMPLES, CKPT_INTERVAL, EVAL_INTERVAL = 2, 2, 100, 500
TINY = [
    f"trainer.max_steps={STEPS}",
    f"trainer.train_batch_size={GROUPS}",
    f"trainer.policy_mini_batch_size={GROUPS}",
    f"generator.n_samples_per_prompt={SAMPLES}",
    f"trainer.ckpt_interval={CKPT_INTERVAL}",
    f"trainer.eval_interval={EVAL_INTERVAL}",
    "trainer.max_ckpts_to_keep=3",
    "trainer.epochs=100000",
    "trainer.algorithm.use_kl_loss=false",
    "generator.sampling_params.max_generate_length=4",
]
MOST_BYTES_OF_MEMORY = 1000
"""Per step and process: 10 MB in 10,000 steps. What allocators keep comes at once and not step by step."""
MOST_BYTES = {"metrics": 4500, "tensorboard": 5000, "batches": 1500, "logs": 300, "evals": 100}
"""Per step, of what grows with it; all other folders stay as they are."""
FILES = {"batches": 1.0, "evals": 2 / EVAL_INTERVAL}


def test_each_task_reads_what_is_written_as_a_long_history(tmp_path: Path) -> None:
    run = write_long_run(Run(tmp_path / "long" / "steps-3"), 3, 2)
    for task in TASKS.values():
        task(run)
    assert [len(groups) for groups in trained_groups(run)] == [2] * 3


@pytest.mark.soak
def test_what_grows_in_ten_thousand_steps(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = place / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    few = place / "few.jsonl"
    few.write_text("".join(json.dumps(row) + "\n" for row in _rows()))
    settings = [*TINY, f"data.val_data=['{few}']"]
    done = hpcrl("submit", str(QUICKSTART), "--local", "trainer.run_name=long", *settings, cwd=place)
    assert done.returncode == 0, done.stderr
    run = Run.open(place / "runs" / "quickstart" / "long")
    for attempt, step in enumerate(PREEMPTED_AFTER, 1):
        wait_for(run.batch(step).exists, lambda: logs_of(run), 300 + STEPS)
        _preempt(run)
        wait_for(lambda attempt=attempt: _ended(run, attempt), lambda: logs_of(run), 120)
        resumed = hpcrl("resume", str(run.path), cwd=place)
        assert resumed.returncode == 0, resumed.stderr
    with (place / "followed").open("w") as said:
        following = subprocess.Popen([HPCRL, "follow", str(run.path)], stdout=said, cwd=place)
        measured = _watch(run)
        following.wait(60)
    outcome = outcome_of(run, len(PREEMPTED_AFTER) + 1)
    assert outcome is not None
    assert outcome.kind == "done", logs_of(run)
    groups = [group for step in trained_groups(run) for group in step]
    assert len(groups) == len(set(groups)) == STEPS * GROUPS
    assert hpcrl("verify", str(run.path), cwd=place).returncode == 0
    rows, problems = _processes(measured)
    more, others = _folders(measured)
    print("\n" + "\n".join([*rows, *more]))
    assert not [*problems, *others]
    assert sum(files for files, _ in folders_of(temporary).values()) == 0, "temporary files are left"


def _rows() -> list[dict[str, object]]:
    words = ("bkjdf", "gdbca", "lkjih", "fedcb")
    rule = {"method": "rule"}
    return [
        {
            "prompt": [{"role": "user", "content": f"sort: {word}"}],
            "reward_spec": {**rule, "ground_truth": "".join(sorted(word))},
        }
        for word in words
    ]


def _preempt(run: Run) -> None:
    job = states_of([run])[0].submission["job_id"]
    for child in Path(f"/proc/{job}/task/{job}/children").read_text().split():
        os.kill(int(child), signal.SIGTERM)


def _ended(run: Run, attempt: int) -> bool:
    return outcome_of(run, attempt) is not None and not processes_of(run)


def _watch(run: Run) -> list[Measurement]:
    """Return measurements of the last attempt, from the step on from which nothing has to grow; wait until it has ended."""
    last, found = len(PREEMPTED_AFTER) + 1, list[Measurement]()
    for due in range(STEADY_FROM, STEPS - STEPS // 50, STEPS // 25):
        wait_for(lambda due=due: run.batch(due).exists() or outcome_of(run, last), lambda: logs_of(run), 300 + STEPS)
        found.append(measure(run))
    wait_for(lambda: outcome_of(run, last), lambda: logs_of(run), 300 + STEPS)
    return found


def _processes(measured: list[Measurement]) -> tuple[list[str], list[str]]:
    """Return a row per process, and the rows of those that grow."""
    first, last, problems = measured[0], measured[-1], []
    rows = ["| process | memory (MiB) | bytes per step | descriptors | threads |"]
    assert {"controller", "rank-0", "rollout-0", "agent-0", "agent-1", "follow"} <= first.processes.keys()
    assert first.processes.keys() == last.processes.keys()
    for name, before in first.processes.items():
        all_of = [one.processes[name] for one in measured if name in one.processes]
        growth = (last.processes[name].memory - before.memory) / (last.step - first.step)
        descriptors, threads = [one.descriptors for one in all_of], [one.threads for one in all_of]
        rows.append(
            f"| {name} | {before.memory / 2**20:.1f} → {last.processes[name].memory / 2**20:.1f} | {growth:.0f} | "
            f"{min(descriptors)} to {max(descriptors)} | {min(threads)} to {max(threads)} |"
        )
        half = len(all_of) // 2
        flat = max(descriptors[half:]) <= max(descriptors[:half]) + 3 and max(threads[half:]) <= max(threads[:half]) + 8
        if growth > MOST_BYTES_OF_MEMORY or not flat:
            problems.append(rows[-1])
    return rows, problems


def _folders(measured: list[Measurement]) -> tuple[list[str], list[str]]:
    """Return a row per folder of the run directory, and the rows of those that grow more than they have to."""
    first, last, problems = measured[0], measured[-1], []
    steps, rows, half = last.step - first.step, ["| folder | files per step | bytes per step |"], len(measured) // 2
    for name in last.folders:
        files, sizes = zip(*(one.folders.get(name, (0, 0)) for one in measured), strict=True)
        more, bytes_more = (files[-1] - files[0]) / steps, (sizes[-1] - sizes[0]) / steps
        rows.append(f"| {name} | {more:.3f} | {bytes_more:.0f} |")
        # other folders: samples of what is not committed, and a checkpoint on its way
        small = bytes_more < MOST_BYTES[name] if name in MOST_BYTES else max(sizes[half:]) <= 2 * max(sizes[:half])
        few = more <= FILES[name] + 0.01 if name in FILES else max(files[half:]) <= 2 * max(files[:half]) + 20
        if not (small and few):
            problems.append(rows[-1])
    return rows, problems


@pytest.mark.soak
def test_a_start_after_ten_thousand_steps_takes_five_times_what_it_takes_after_two_thousand(tmp_path: Path) -> None:
    short, long = (write_long_run(Run(tmp_path / "p" / str(steps)), steps, 16) for steps in (2000, 10000))
    rows = []
    for task in TASKS:
        (few, _), (many, memory) = (min(cost(run, task) for _ in range(3)) for run in (short, long))
        rows.append(f"| {task} | {few:.2f} | {many:.2f} | {memory:.0f} |")
        assert many < max(8 * few, 0.1), rows[-1]
    print("\n| task | s after 2,000 steps | s after 10,000 | MiB |\n" + "\n".join(rows))
