"""What a step costs around the engine: claims, environments, group files, the controller. The engine answers at once, the trainer trains nothing.

    python benchmarks/rollout_loop.py [--steps N] [--profile DIRECTORY] [KEY=VALUE ...]

A real controller and a real worker, each a process, with configs/quickstart.toml and settings of it; this process is the trainer, which takes
each batch and publishes at once. Strictly on-policy unless settings say otherwise, so that nothing overlaps.
--profile: cProfile's figures of controller and worker go there.
"""

# ruff: noqa: ARG002  methods of an engine take what each engine needs

from __future__ import annotations

import argparse
import asyncio
import cProfile
import os
import platform
import random
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from hpcrl.config import Config
from hpcrl.config.derive import policy_model, publishes
from hpcrl.errors import EngineError
from hpcrl.rollout.engines.base import Engine, Generation, Heard, Launched
from hpcrl.rollout.limiter import Load
from hpcrl.rundir.commit import committed_directory, read_json, write_text
from hpcrl.rundir.layout import Run
from hpcrl.runtime.controller_client import Controller
from hpcrl.runtime.process_status import StatusWriter, read_process_status

if TYPE_CHECKING:
    from hpcrl.data.vision.reader import SeenImage
    from hpcrl.data.weight_files import PublishedWeights

ROOT = Path(__file__).parents[1]
WORKER, CONTROLLER = "rollout-0", "controller"
_START_S = 120.0
_LETTERS, _EOS = range(4, 16), 1  # of the quickstart's tokenizer


class Instant(Engine, Launched):
    """An engine that answers at once, with five letters and the end, whatever it is asked."""

    def __init__(self) -> None:
        self.version, self.answered = 0, 0

    @property
    def waiting(self) -> list[str]:
        return []

    @property
    def loading(self) -> bool:
        return False

    async def generate(
        self,
        prompt_ids: Sequence[int],
        n_samples: int,
        seed: int | None,
        sampling: Mapping[str, Any],
        name: str | None = None,
        heard: Heard | None = None,
        images: Sequence[SeenImage] = (),
    ) -> list[Generation]:
        self.answered += 1
        drawn = random.Random(seed)
        said = [[*drawn.choices(_LETTERS, k=5), _EOS] for _ in range(n_samples)]
        return [Generation(token_ids, [-0.5] * 6, "stop", [self.version] * 6) for token_ids in said]

    async def top_tokens(self, token_ids: Sequence[int], count: int) -> list[list[int]]:
        raise EngineError("this engine has no probabilities")

    async def ended(self) -> dict[str, dict[int, Generation]]:
        return {}

    async def sleep(self) -> None: ...

    async def update_weights(self, weights: PublishedWeights) -> dict[str, float]:
        self.version = weights.version
        return {}

    async def probe(self, weights: PublishedWeights, dtype: str, allowed: float | None) -> float | None:
        return None

    async def tokens(self) -> float | None:
        return None

    async def load(self) -> Load | None:
        return None

    async def healthy(self) -> bool:
        return True

    async def close(self) -> None: ...

    def wait_ready(self, timeout_s: float, still_waiting: Callable[[], object] = lambda: None) -> None: ...

    def connect(self, *, version: int = 0, replica: str = "") -> Engine:
        return self

    def alive(self) -> bool:
        return True

    def failure(self, what: str) -> EngineError:
        return EngineError(what)

    def stop(self) -> None: ...


def be_worker(run: Run) -> None:
    from hpcrl.data.tokenizer import decoder, load_tokenizer, without_torch
    from hpcrl.rollout.generate import conversations
    from hpcrl.rollout.worker import work

    job = runpy.run_path(str(ROOT / "jobs" / "rollout.py"))
    config = Config.from_toml([run.config])
    options = job["worker_options"](run, config, 1, 0)
    with without_torch():
        tokenizer = load_tokenizer(policy_model(config.trainer), config.generator.chat_template)
    status = StatusWriter(run, WORKER, 1)
    maker = conversations(tokenizer, config.generator, config.environment)
    asyncio.run(work(options, Instant(), maker, decoder(tokenizer), status))


def be_controller(run: Run) -> None:
    runpy.run_path(str(ROOT / "jobs" / "controller.py"))["main"](str(run.path))


def profiled(role: Callable[[Run], None], run: Run, profile: str) -> None:
    if not profile:
        return role(run)
    with cProfile.Profile() as figures:
        role(run)
    figures.dump_stats(profile)
    return None


def start(run: Run, role: str, profile: Path | None) -> subprocess.Popen[bytes]:
    figures = str(profile / f"{role}.prof") if profile else ""
    environment = {**os.environ, "HPCRL_ATTEMPT": "1", "HPCRL_ADDRESS": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, __file__, "--as", role, str(run.path), figures], env=environment)


def processor_s(process: subprocess.Popen[bytes]) -> float:
    """Return the seconds of processor that a process has had."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def publish(run: Run, version: int) -> None:
    with committed_directory(run.weights_of(version), 1, version=version, tensors={}) as directory:
        (directory / "model-00001.safetensors").write_bytes(bytes(350_000))


def train(run: Run, config: Config, steps: int, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Take the batches of some steps; print what each costs."""
    waits, evaluated, used = list[float](), list[float](), [list[float]() for _ in processes]
    trainer = Controller(run, 1)
    trainer.call("start", step=0)
    for step in range(1, steps + 1):
        began, had = time.monotonic(), [processor_s(process) for process in processes]
        while not (answer := trainer.call("next", step=step))["path"]:
            assert answer["stop"] is None, answer
        waited = time.monotonic() - began
        assert read_json(run.path / answer["path"])
        interval = config.trainer.eval_interval
        if interval > 0 and (step - 1) % interval == 0:
            evaluated.append(waited)
        else:
            waits.append(waited)
            for process, before, values in zip(processes, had, used, strict=True):
                values.append(processor_s(process) - before)
        if publishes(config.trainer, step, steps):
            publish(run, step)
            trainer.call("published", version=step)
    while trainer.call("next", step=steps + 1)["stop"] is None:
        time.sleep(0.1)
    trainer.close()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"from a version to the next batch  {1000 * median(waits):7.0f} ms (median of {len(waits)} steps)")
    if evaluated:
        print(f"the same with an evaluation       {1000 * median(evaluated):7.0f} ms (median of {len(evaluated)})")
    for name, values in zip((CONTROLLER, "worker"), used, strict=True):
        print(f"processor of the {name:16} {1000 * sum(values) / len(values):7.0f} ms per step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        run = Run(Path(temporary) / "quickstart" / "loop")
        settings = [f"trainer.max_steps={arguments.steps}", *arguments.settings]
        config = Config.from_toml([ROOT / "configs" / "quickstart.toml"], settings)
        write_text(run.config, config.to_toml())
        write_text(run.token, "a-token-of-the-benchmark\n", mode=0o600)
        processes = [start(run, CONTROLLER, arguments.profile)]
        try:
            deadline = time.monotonic() + _START_S
            while (status := read_process_status(run, CONTROLLER, 1)) is None or "url" not in status.facts:
                assert time.monotonic() < deadline, "the controller did not start"
                time.sleep(0.1)
            processes.append(start(run, "worker", arguments.profile))
            while read_process_status(run, WORKER, 1) is None:
                assert time.monotonic() < deadline, "the worker did not start"
                time.sleep(0.1)
            train(run, config, arguments.steps, processes)
        finally:
            for process in processes:
                if sys.exc_info()[0]:
                    process.kill()
                process.wait()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as"]:
        _, _, role, path, profile = sys.argv
        profiled({CONTROLLER: be_controller, "worker": be_worker}[role], Run.open(path), profile)
    else:
        main()
