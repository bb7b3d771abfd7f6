"""Colocated runs with a staleness of 0 and of 1, where the lengths of samples differ tenfold: samples per second, and the score in the end.

    python benchmarks/turns.py [--times 3] [--root DIR] [KEY=VALUE ...]

The task is the quickstart's. An eighth of the prompts ask ten times, the others once, and each answer of the environment takes as long as a
call of a tool. Rates are over the steps from the third on, in which nothing is evaluated. Runs of both kinds alternate; medians and their
ratio are printed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow.parquet as pq

from hpcrl.envs.base import Turn
from hpcrl.envs.tasks.sort_letters import SortLetters
from hpcrl.observe.metrics import merged
from hpcrl.rundir.layout import Run

ROOT = Path(__file__).parents[1]
TURNS, ONE_IN, TOOL_S = 10, 8, 0.4
STEPS, WARM = 20, 2
BATCH, SAMPLES = 16, 4
_SCORE = "eval/all/avg_score"


class Uneven(SortLetters):
    """Asks for the sorted letters once, or as often as TURNS says; pays the last answer."""

    def __init__(self, extras: Mapping[str, Any]) -> None:
        super().__init__(extras)
        letters = str(extras["reward_spec"]["ground_truth"])
        self._left = TURNS if zlib.crc32(letters.encode()) % ONE_IN == 0 else 1

    def solution(self) -> str | None:
        return None  # its first answer may be worth nothing

    def step(self, action: str) -> Turn:
        self._left -= 1
        time.sleep(TOOL_S)
        answer = super().step(action)
        again = [{"role": "user", "content": "again"}]
        return answer if self._left == 0 else Turn(again, 0.0, done=False)


def uneven(directory: Path) -> list[str]:
    """Write the quickstart's rows without their environment; return the settings by which runs train them in this one."""
    found = list[str]()
    for kind, name in {"train_data": "train", "val_data": "validation"}.items():
        rows = pq.read_table(ROOT / "configs" / "quickstart" / "data" / f"{name}.parquet")
        pq.write_table(rows.drop_columns(["env_class"]), directory / f"{name}.parquet")
        found.append(f"data.{kind}=[{str(directory / f'{name}.parquet')!r}]")
    return [
        *found,
        f"python_path=[{str(ROOT / 'benchmarks')!r}]",
        "environment.env_class=turns:Uneven",
        f"environment.skyrl_gym.max_env_workers={4 * BATCH * SAMPLES}",
        f"generator.max_turns={TURNS}",
        "generator.max_input_length=240",
    ]


def settings(staleness: int) -> list[str]:
    return [
        f"trainer.fully_async.max_staleness_steps={staleness}",
        f"trainer.max_steps={STEPS}",
        f"trainer.train_batch_size={BATCH}",
        f"trainer.policy_mini_batch_size={BATCH}",
        f"trainer.eval_interval={STEPS}",
        "trainer.ckpt_interval=0",
        f"generator.n_samples_per_prompt={SAMPLES}",
    ]


def run(root: Path, name: str, staleness: int, others: list[str]) -> tuple[float, float]:
    """Return samples per second and the last score of a run."""
    command = [str(Path(sys.executable).with_name("hpcrl")), "submit", "--local", "--follow"]
    named = [f"{ROOT}/configs/quickstart_colocated.toml", f"slurm.root={root}", f"trainer.run_name={name}"]
    done = subprocess.run(
        [*command, *named, *settings(staleness), *others], capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    found = merged(Run.open(root / "quickstart_colocated" / name))
    seconds = [metrics["timing/step"] for step, metrics in found.items() if step > WARM and "timing/step" in metrics]
    scores = [metrics[_SCORE] for _, metrics in sorted(found.items()) if _SCORE in metrics]
    return len(seconds) * BATCH * SAMPLES / sum(seconds), scores[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--root", type=Path, help="keep the runs there (default: a temporary directory)")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        given = [*uneven(Path(temporary)), *arguments.settings]
        root, found = arguments.root or Path(temporary), dict[int, list[tuple[float, float]]]({0: [], 1: []})
        for number in range(arguments.times):
            for staleness, runs in found.items():
                runs.append(run(root, f"staleness-{staleness}-{number}", staleness, given))
                print(f"staleness {staleness}: {runs[-1][0]:7.1f} samples/s, score {runs[-1][1]:.3f}", flush=True)
    (slow, before), (fast, after) = ([median(each) for each in zip(*runs, strict=True)] for runs in found.values())
    print(f"median: {slow:.1f} and {fast:.1f} samples/s, {fast / slow:.2f} times; scores {before:.3f} and {after:.3f}")


if __name__ == "__main__":
    main()
