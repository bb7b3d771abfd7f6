"""What asynchronous training gains where samples differ in length: the same steps with different bounds of staleness.

    python benchmarks/async_training.py [--staleness 0 1 4] [--seeds N] [--steps N] [--root DIR] [--apart] [KEY=VALUE ...]

The quickstart's model sorts words, but as many after another as the prompt wants: one, three or ten, so that samples differ tenfold in length.
Each run is `hpcrl submit --local` with the same prompts in the same order, as many steps, and truncated importance sampling; only
trainer.fully_async.max_staleness_steps differs. Figures are of the run's own metrics; the first step is left out, it warms up.

On one machine trainer and engine take the processor from each other. With --apart the trainer's node has the first core alone, and the engine's
node the second, as if they were two machines.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from quickstart import processes

from hpcrl.envs.base import Messages, Turn
from hpcrl.observe.metrics import merged
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import read_outcome

ROOT = Path(__file__).parents[1]
_ALPHABET, _LETTERS = "abcdefghijkl", 5
_ROUNDS = {1: 0.6, 3: 0.25, 10: 0.15}
_LAST = 5  # steps over which the reward is averaged
_POLL_S = 2.0
_LONGEST = 240  # positions of the quickstart's model: 256


class Rounds:
    """Sort one word after another; each is worth the same, all together 1."""

    def __init__(self, extras: Mapping[str, Any]) -> None:
        self._words = list(extras["words"])
        self._at = 0

    def init(self, messages: Messages) -> Messages:
        return messages

    def step(self, action: str) -> Turn:
        right = action == "".join(sorted(self._words[self._at]))
        self._at += 1
        done = self._at == len(self._words)
        following = [] if done else [_ask(self._words[self._at])]
        return Turn(following, right / len(self._words), done, metrics={"rounds": float(len(self._words))})

    def close(self) -> None:
        pass


def _ask(word: str) -> dict[str, str]:
    return {"role": "user", "content": f"sort: {word}"}


def write_prompts(path: Path, count: int) -> None:
    """Write prompts that want one, three or ten words."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    source, rows = random.Random(0), []
    for _ in range(count):
        (rounds,) = source.choices(list(_ROUNDS), list(_ROUNDS.values()))
        words = ["".join(source.choices(_ALPHABET, k=_LETTERS)) for _ in range(rounds)]
        rows.append({"data_source": "rounds", "prompt": [_ask(words[0])], "words": words})
    pq.write_table(pa.Table.from_pylist(rows), path)


@dataclass(frozen=True)
class Figures:
    """Of one run.

    Attributes:
        command_s: of the whole command, engine start included.
        wall_s: from the end of the first step to the end of the last.
        trainer_idle, engine_idle: shares of that time.
        staleness: mean over groups.
        reward: mean over the samples of the last steps.
    """

    command_s: float
    wall_s: float
    trainer_idle: float
    engine_idle: float
    staleness: float
    reward: float


def keep_apart(session: int) -> None:
    """Give the processes below `session` the core of their node."""
    for pid, (name, _) in processes({session}).items():
        core = 0 if name in ("trainer rank", "controller") else 1
        with suppress(OSError):  # it has ended
            for thread in os.listdir(f"/proc/{pid}/task"):
                os.sched_setaffinity(int(thread), {core})


def measure(
    root: Path, prompts: Path, staleness: int, seed: int, steps: int, apart: bool, settings: list[str]
) -> Figures:
    """Train once; leave the run in `root`."""
    name, began = f"staleness-{staleness}-seed-{seed}", time.monotonic()
    given = {
        "data.train_data": f'["{prompts}"]',
        "trainer.run_name": name,
        "trainer.seed": seed,
        "trainer.max_steps": steps,
        "trainer.eval_interval": 0,
        "trainer.ckpt_interval": 0,
        "trainer.fully_async.max_staleness_steps": staleness,
        "trainer.algorithm.off_policy_correction.tis_ratio_type": "token",
        "generator.max_turns": max(_ROUNDS),
        "generator.max_input_length": _LONGEST,
        "environment.env_class": "async_training:Rounds",
        "python_path": f'["{ROOT / "benchmarks"}"]',
        "slurm.root": root,
    }
    command = [
        sys.executable,
        "-m",
        "hpcrl.cli.main",
        "submit",
        str(ROOT / "configs" / "quickstart.toml"),
        "--local",
        "--follow",
    ]
    command += [f"{path}={value}" for path, value in given.items()] + settings
    environment = os.environ | ({"OMP_NUM_THREADS": "1"} if apart else {})
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment) as process:
        while process.poll() is None:
            if apart:
                keep_apart(process.pid)
            time.sleep(_POLL_S)
    run = Run.open(root / "quickstart" / name)
    outcome = read_outcome(run)
    if outcome is None or outcome.kind != "done":
        sys.exit(f"the run did not finish: {outcome}; logs in {run.path / 'logs'}")
    return read_figures(run, time.monotonic() - began)


def read_figures(run: Run, command_s: float) -> Figures:
    found = merged(run)
    trained = [metrics for step, metrics in sorted(found.items()) if step > 1 and "timing/step" in metrics]
    wall = sum(metrics["timing/step"] for metrics in trained)
    waited = sum(metrics["timing/wait_for_generation_buffer"] for metrics in trained)
    # a worker's metrics of version v are of the time in which step v + 1 is generated
    idle = [
        value
        for version, metrics in found.items()
        if version > 0
        for name, value in metrics.items()
        if name.startswith("generate/idle_seconds")
    ]
    return Figures(
        command_s=command_s,
        wall_s=wall,
        trainer_idle=waited / wall,
        engine_idle=sum(idle) / wall,
        staleness=fmean(metrics["async/staleness_mean"] for metrics in trained),
        reward=fmean(metrics["reward/avg_raw_reward"] for metrics in trained[-_LAST:]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 4])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--root", type=Path, help="keep the runs there (default: a temporary directory)")
    parser.add_argument("--apart", action="store_true", help="a core for the trainer's node, another for the engine's")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(
        f"| staleness | seed | s for {arguments.steps - 1} steps | trainer idle | engine idle | staleness, mean | reward, last {_LAST} steps | whole command, s |"
    )
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        root, prompts = arguments.root or Path(temporary), Path(temporary) / "prompts.parquet"
        write_prompts(prompts, 4096)
        for seed in range(1, arguments.seeds + 1):
            for bound in arguments.staleness:
                one = measure(root, prompts, bound, seed, arguments.steps, arguments.apart, arguments.settings)
                shares = f"{one.trainer_idle:.1%} | {one.engine_idle:.1%} | {one.staleness:.2f}"
                print(
                    f"| {bound} | {seed} | {one.wall_s:.1f} | {shares} | {one.reward:.3f} | {one.command_s:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
