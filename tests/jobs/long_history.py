"""A run that has trained thousands of steps, written by the project's own writers, and what it takes to continue or to look at it.

python -m tests.jobs.long_history FOLDER STEPS [GROUPS]    makes it there, if it is not, and prints a line per task
"""

from __future__ import annotations

import gc
import json
import resource
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

from hpcrl.controller.prompt_stream import group_id
from hpcrl.controller.recovery import read_history
from hpcrl.data.batch_file import FIRST, write_batch
from hpcrl.observe.live_status import LiveStatusReader
from hpcrl.observe.metrics import MetricsWriter, values_of
from hpcrl.observe.summary import headline, summarise
from hpcrl.observe.tensorboard.event_file import rebuild
from hpcrl.rundir.commit import begin, finish, write_text
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import open_attempt, report_outcome
from hpcrl.rundir.starts import note
from hpcrl.types import Batch, GroupMeta
from tests.paths import QUICKSTART
from tests.rows import group_meta

SAMPLES = 8
_VALUES = {"trainer": 60, "controller": 24, "rollout-0": 12}
"""By process: how many metrics it reports of a step."""


def write_long_run(run: Run, steps: int, groups: int) -> Run:
    """Write a run of one attempt that saved after its last step; it has no samples, weights or states of a model."""
    write_text(run.config, QUICKSTART.read_text())
    open_attempt(run, "local-1", ["n1"])
    note(run, {"attempt": 1, "from": None})
    checksum = FIRST
    for step in range(1, steps + 1):
        checksum = write_batch(
            run, Batch(step, [_group(step, number, groups) for number in range(groups)], step * groups), checksum
        )
    for process, count in _VALUES.items():
        names = [
            "reward/avg_raw_reward",
            "timing/step",
            *(f"policy/loss_metrics/{number}" for number in range(count - 2)),
        ]
        with MetricsWriter(run, process, 1, 0) as writer:
            for step in range(1, steps + 1):
                writer.write(step, {name: step / (7 + place) for place, name in enumerate(names)})
    for step in (steps - 1, steps):
        begin(run.checkpoint(step), 1)
        finish(run.checkpoint(step), 1, step=step)
    report_outcome(run, 1, "interrupted", "preempted", "agent-0")
    return run


def _group(step: int, number: int, groups: int) -> GroupMeta:
    name = group_id((step - 1) * groups + number)
    return group_meta(
        group_id=name,
        path=f"samples/0/{name}.safetensors",
        rewards=[0.0, 1.0] * (SAMPLES // 2),
        lengths=[14] * SAMPLES,
        response_lengths=[6] * SAMPLES,
        stop_reasons=["stop"] * SAMPLES,
        env_metrics=[{"correct": 0.0}, {"correct": 1.0}] * (SAMPLES // 2),
        oldest_version=step - 1,
        newest_version=step - 1,
        data_source="sort_letters",
        seconds=1.25,
        digest="0" * 32,
    )


def _resume(run: Run) -> None:
    step = max(int(path.stem[1:]) for path in run.batches.iterdir())
    read_history(run, step, 1, lambda _: True, lambda _following, _meta: True, step - 1)


TASKS: dict[str, Callable[[Run], object]] = {
    "the controller reads batches and samples": _resume,
    "TensorBoard's file is made anew": rebuild,
    "hpcrl status RUN": summarise,
    "a line of hpcrl status": headline,
    "the first look of --follow": lambda run: LiveStatusReader(run).read(),
    "one metric, for ckpt_keep_best": lambda run: values_of(run, "reward/avg_raw_reward"),
}


def cost(run: Run, task: str) -> tuple[float, float]:
    """Return the processor seconds of a task and the MiB by which its process grew at most."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(_cost, (run.path, task))


def _cost(path: Path, task: str) -> tuple[float, float]:
    run, before = Run(path), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    gc.collect()
    began = time.process_time()
    TASKS[task](run)
    return time.process_time() - began, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main(folder: str, steps: str, groups: str = "16") -> None:
    run = Run(Path(folder).absolute() / "long" / f"steps-{steps}")
    if not run.config.exists():
        write_long_run(run, int(steps), int(groups))
    for task in TASKS:
        seconds, memory = cost(run, task)
        print(
            json.dumps({"steps": int(steps), "task": task, "seconds": round(seconds, 3), "MiB": round(memory)}),
            flush=True,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
