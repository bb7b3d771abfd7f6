"""What only a GPU can show, in some twelve minutes on one: each check prints one line of JSON, and none is kept from running by another's failure.

    python benchmarks/gpu_first.py [--only NAME ...] [--tiny] [--keep FOLDER]

Each check is a command of its own with a time limit. First come whole runs with vLLM in turns on the GPU, then the tests of engines on it, then what
the trainer computes. Models are random and made on the spot; nothing is downloaded. --tiny makes all of it small enough for a CPU, with vLLM's CPU
build, where figures say nothing about a GPU, but every check runs that a CPU can do. --keep leaves whole runs there, with their logs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_BENCHMARKS = Path(__file__).parent
_TAIL = 2000  # characters of an error
_CANCEL_S = 30
_TESTS = ["tests/rollout/engines/test_contract.py", "tests/rollout/engines/vllm/test_server.py"]
_ADAPTERS = "tests/rollout/engines/test_adapters.py"


@dataclass(frozen=True)
class Check:
    """A command.

    Attributes:
        on_cpu: arguments that it gets with --tiny; None: a GPU alone can do it.
        seconds: that it may take, five times as many with --tiny, before it is ended; a whole run cancels itself, and has half a minute for it.
        model: whether the path of the random model is its next argument.
        keeps: whether it takes --keep.
    """

    program: list[str]
    on_cpu: tuple[str, ...] | None = ()
    seconds: int = 60
    model: bool = False
    keeps: bool = False


def _run(name: str, seconds: int = 150, *, on_gpu_alone: bool = False) -> Check:
    program = [str(_BENCHMARKS / "gpu_runs.py"), "--only", name, "--seconds", str(seconds)]
    return Check(program, None if on_gpu_alone else ("--cpu",), seconds, keeps=True)


def _computed(name: str, seconds: int = 60) -> Check:
    return Check([str(_BENCHMARKS / "gpu_checks.py"), name], ("--tiny",), seconds, model=True)


def _measured(name: str) -> Check:
    steps = ["--steps", "3", "--only", name]
    return Check([str(_BENCHMARKS / "gpu_settings.py"), *steps], ("--tiny",), 90)


def _tests(*paths: str) -> Check:
    return Check(["-m", "pytest", "-q", "-m", "", "-n", "0", "-p", "no:cacheprovider", *paths], seconds=180)


CHECKS = {
    "versions": _computed("versions"),
    "vllm": _run("vllm"),
    "engines": _tests(*_TESTS),
    "vllm, router replay": _run("vllm, router replay", on_gpu_alone=True),
    "vllm, no router replay": _run("vllm, no router replay"),
    "supervised, Megatron-core, experts": _run("supervised, Megatron-core, experts"),
    "Megatron-core": _run("Megatron-core"),
    **{name: _computed(name) for name in ("attention", "kinds", "prefixes", "waits")},
    "ranks": Check([str(_BENCHMARKS / "gpu_ranks.py")], ("--cpu",), 90),
    "weights_between": _computed("weights_between", 90),
    "vllm, checkpoints beside training": _run("vllm, checkpoints beside training"),
    "checkpoint": _computed("checkpoint"),
    "compiled": _measured("compile_model, use_torch_compile"),
    "activation_offload": _measured("activation_offload"),
    "cpu_offload": _measured("fsdp_config.cpu_offload"),
    "vllm, fp8": _run("vllm, fp8", on_gpu_alone=True),
    "vllm, adapters": _run("vllm, adapters"),
    "engines with adapters": _tests(_ADAPTERS),
    **{name: _computed(name) for name in ("attention_speed", "head", "engine", "no_gpu")},
}


def perform(name: str, model: str, tiny: bool, keep: Path | None) -> dict[str, Any]:
    """Run a check to its end, or to its limit; return its last line of JSON, or the end of what it printed."""
    check = CHECKS[name]
    if tiny and check.on_cpu is None:
        return {"skipped": "a GPU alone can do it"}
    command = [
        sys.executable,
        *check.program,
        *([model] if check.model else []),
        *((check.on_cpu or ()) if tiny else ()),
        *(["--keep", str(keep)] if keep and check.keeps else []),
    ]
    environment = os.environ | {"HPCRL_TEST_GPU": "" if tiny else "1", "PYTHONPATH": os.pathsep.join(_paths())}
    environment |= {"CUDA_VISIBLE_DEVICES": ""} if name == "no_gpu" else {}
    began, limit = time.monotonic(), check.seconds * (5 if tiny else 1) + (_CANCEL_S if check.keeps else 0)
    with subprocess.Popen(
        command, cwd=_BENCHMARKS.parent, env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=limit)
            ended = f"exit status {process.returncode}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            ended = f"more than {limit} s"
    found: dict[str, Any] = {"seconds": round(time.monotonic() - began, 1)}
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    found |= {"found": lines[0] if len(lines) == 1 else lines} if lines else {"end": output[-_TAIL:]}
    return found if process.returncode == 0 else {"failed": ended, **found, "end": output[-_TAIL:]}


def _make_model(place: str, tiny: bool) -> None:
    from random_qwen3 import make_model

    make_model(Path(place), tiny=tiny)


def _paths() -> list[str]:
    return [str(_BENCHMARKS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS))
    parser.add_argument("--tiny", action="store_true", help="for a CPU")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where whole runs are left")
    given = parser.parse_args()
    if not torch.cuda.is_available() and not given.tiny:
        parser.error("there is no GPU; expected one, or --tiny, which runs on a CPU")
    failed = False
    with tempfile.TemporaryDirectory() as model:
        # in a process of its own: this one would keep memory of the GPU, and runs refuse GPUs that others use
        if any(CHECKS[name].model for name in given.only):
            making = multiprocessing.get_context("spawn").Process(target=_make_model, args=(model, given.tiny))
            making.start()
            making.join()
        for name in given.only:
            found = perform(name, model, given.tiny, given.keep)
            failed |= "failed" in found
            print(json.dumps({"check": name, **found}), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
