"""Whether small runs of each kind go through on one GPU, trainer and embedded engine in turns: one line of JSON per run, one run after the other.

    python benchmarks/gpu_runs.py [KEY=VALUE ...] [--only NAME ...] [--cpu]

Each is a configuration of configs/ for some steps, with overrides for all of them behind. A run without a failed or restarted process and
with a better score is what to expect; with --cpu the same runs compute on the CPU. Simulators render with what MUJOCO_GL names.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_STEPS, _TAIL = 4, 400  # characters of an error
_TURNS = ["trainer.placement.colocate_all=true"]
_HALF = [
    "trainer.policy.fsdp_config.mixed_precision.param_dtype=bf16",
    "generator.inference_engine.model_dtype=bfloat16",
]
_CRITIC = [
    "trainer.algorithm.advantage_estimator=gae",
    "trainer.critic_mini_batch_size=32",
    f"trainer.critic.model.path={ROOT}/configs/quickstart/model",
]
_ADAPTERS = [
    "trainer.policy.model.lora.rank=8",
    "trainer.policy.model.lora.alpha=16.0",
    "trainer.algorithm.use_kl_loss=false",
]
_RUNS: dict[str, tuple[str, list[str]]] = {
    "float32": ("quickstart_colocated", _TURNS),
    "bfloat16": ("quickstart_colocated", [*_TURNS, *_HALF]),
    "critic": ("quickstart_colocated", [*_TURNS, *_HALF, *_CRITIC]),
    "adapters": ("quickstart_colocated", [*_TURNS, *_ADAPTERS]),
    "images": ("count_shapes", _TURNS),
    "diffusion": ("diffusion_tiny", _TURNS),
    "openvla": ("reach_vla", _TURNS),
    "pi05": ("reach_pi05", _TURNS),
    "supervised": ("sft_tiny", []),
    "supervised diffusion": ("diffusion_sft_tiny", []),
    "supervised, Megatron-core": ("sft_tiny", ["trainer.strategy=megatron", "trainer.policy.fsdp_config=default"]),
}  # fmt: skip


def play(configuration: str, overrides: list[str], root: str) -> dict[str, Any]:
    """Run it to its end and say how it went: scores or validation losses at first and at last, failures of processes."""
    environment = {**os.environ, "HPCRL_ROOT": root}
    command = [sys.executable, "-m", "hpcrl.cli.main"]
    toml, began = f"configs/{configuration}.toml", time.monotonic()
    done = subprocess.run(
        [*command, "submit", toml, f"trainer.max_steps={_STEPS}", *overrides, "--local", "--follow"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    seconds = round(time.monotonic() - began, 1)
    told = subprocess.run([*command, "status", "--json"], env=environment, capture_output=True, text=True, check=False)
    runs = json.loads(told.stdout) if told.returncode == 0 else []
    if not runs:  # it was refused
        return {"seconds": seconds, "failed": (done.stdout + done.stderr)[-_TAIL:]}
    (run,) = runs
    summary = run["summary"]
    return {
        "seconds": seconds,
        "state": run["state"],
        "detail": run["detail"][:_TAIL],
        "score": [summary["eval_first"], summary["eval_last"]],
        "loss": [summary["loss_first"], summary["loss_last"]],
        "restarts": [line[:_TAIL] for line in done.stdout.splitlines() if "to be started again" in line],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=_RUNS, default=list(_RUNS))
    parser.add_argument("--cpu", action="store_true", help="without a GPU")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    given = parser.parse_args()
    device, failed = f"slurm.gpus_per_node={0 if given.cpu else 1}", False
    for name in given.only:
        configuration, overrides = _RUNS[name]
        with tempfile.TemporaryDirectory() as root:
            found = play(configuration, [device, *overrides, *given.overrides], root)
        failed |= found.get("state") != "done" or bool(found["restarts"])
        print(json.dumps({"run": name, "configuration": configuration, **found}), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
