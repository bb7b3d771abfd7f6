"""What a run of the quickstart costs: throughput, pauses, who waits for whom, memory of each process.

    python benchmarks/quickstart.py [--root DIR] [KEY=VALUE ...]

Runs `hpcrl submit configs/quickstart.toml --local` and reads the run's own metrics; memory is the kernel's high-water mark of each process.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from process_tree import descendants

from hpcrl.observe.metrics import merged
from hpcrl.observe.summary import summarise
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import read_outcome

ROOT = Path(__file__).parents[1]
_POLL_S = 0.5
_NAMES = {
    "jobs/train.py": "trainer rank",
    "jobs/rollout.py": "rollout worker",
    "jobs/controller.py": "controller",
    "VLLM::EngineCore": "vLLM engine core",
    "api_server": "vLLM API server",
    "hpcrl.engines.vllm.main": "vLLM API server",
    "torch.distributed.run": "torchrun",
    "submitit.core._submit": "node agent",
}


def processes(session: set[int]) -> dict[int, tuple[str, float]]:
    """Return name and peak resident memory in MiB of every process of ours that descends from `session`."""
    named = {
        pid: (next((name for word, name in _NAMES.items() if word in found.command), None), found.peak_mib)
        for pid, found in descendants(session).items()
    }
    return {pid: (name, peak) for pid, (name, peak) in named.items() if name}


def run_quickstart(root: Path, settings: list[str]) -> tuple[Run, dict[str, float], float]:
    """Run to the end; return the run, peak memory in MiB by process name, and the wall-clock seconds of the command."""
    began, peaks = time.monotonic(), dict[str, float]()
    submit = [sys.executable, "-m", "hpcrl.cli.main", "submit", "--local", "--follow"]
    command = [
        *submit,
        f"{ROOT}/configs/quickstart.toml",
        "trainer.run_name=benchmark",
        f"slurm.root={root}",
        *settings,
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            for name, peak in processes({process.pid}).values():
                peaks[name] = max(peak, peaks.get(name, 0.0))
            time.sleep(_POLL_S)
    run = Run.open(root / "quickstart" / "benchmark")
    outcome = read_outcome(run)
    if outcome is None or outcome.kind != "done":
        sys.exit(f"the run did not finish: {outcome}; logs in {run.path / 'logs'}")
    return run, peaks, time.monotonic() - began


def report(run: Run, peaks: dict[str, float], wall: float) -> None:
    """Print the figures; the first step is left out where a median is taken, it warms up."""
    steps = [metrics for step, metrics in sorted(merged(run).items()) if step > 1 and "timing/step" in metrics]

    def middle(name: str) -> float:
        return median(metrics[name] for metrics in steps if name in metrics)

    summary = summarise(run)
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"whole command         {wall:8.1f} s, {summary.steps} steps")
    print(f"eval score            {summary.eval_first} -> {summary.eval_last}")
    print(f"s/step                {middle('timing/step'):8.2f} (median)")
    print(f"tokens/s              {middle('throughput/tokens_per_second'):8.0f} (median over steps, prompts included)")
    names = sorted({name for metrics in steps for name in metrics} - {"timing/step"})
    for name in [name for name in names if name.startswith("timing/")]:
        total = sum(metrics.get(name, 0.0) for metrics in steps)
        share = total / sum(metrics["timing/step"] for metrics in steps)
        print(f"  trainer: {name.removeprefix('timing/'):34} {share:6.1%} of a step")
    for name in [name for name in names if name.startswith(("weights/", "generate/idle"))]:
        print(f"  {name:43} {middle(name) * 1000:8.0f} ms (median per step)")
    for name, peak in sorted(peaks.items(), key=lambda item: -item[1]):
        print(f"  peak memory: {name:30} {peak:8.0f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="keep the run there (default: a temporary directory)")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        report(*run_quickstart(arguments.root or Path(temporary), arguments.settings))


if __name__ == "__main__":
    main()
