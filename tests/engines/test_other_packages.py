"""An engine of another package: three files and an entry point, with which whole runs generate."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.data.rollouts import require_samples
from hpcrl.rundir.layout import Run
from tests.jobs.small_run import SMALL, logs_of
from tests.paths import QUICKSTART

BACKEND = """
from hpcrl.config.backend import Backend
from hpcrl.config.errors import Problem


def no_adapters(config):
    if config.trainer.policy.model.lora.rank:
        yield Problem("trainer.policy.model.lora.rank", "expected 0: a toy loads no adapters")


class Toy(Backend):
    name, title, package = "toy", "the toy", "toy_engine"
    rules = (no_adapters,)


BACKEND = Toy()
"""
ROLLOUT = '''
"""Each token is any of the vocabulary with the same probability."""

import json
import math
import random
from pathlib import Path

from hpcrl.rollout.engines.base import Generation
from hpcrl.rollout.engines.in_process import InProcess, InProcessEngine


class ToyEngine(InProcessEngine):
    def __init__(self, vocabulary, version, replica):
        super().__init__(replica)
        self._vocabulary, self.version = vocabulary, version

    async def generate(self, prompt_ids, n_samples, seed, sampling, name=None, heard=None, images=()):
        found, length = [], sampling["max_tokens"]
        with self._asked("generate"):
            for index in range(n_samples):
                dice = random.Random(None if seed is None else seed + index)
                tokens = [dice.randrange(self._vocabulary) for _ in range(length)]
                logprobs = [-math.log(self._vocabulary)] * length
                found.append(Generation(tokens, logprobs, "length", [self.version] * length))
        return found

    async def top_tokens(self, token_ids, count):
        return [list(range(count)) for _ in token_ids[1:]]

    async def ended(self):
        return {}

    async def update_weights(self, weights):
        self.version = weights.version  # it has none
        return {}

    async def sleep(self):
        pass

    async def probe(self, weights, dtype, allowed):
        return None

    async def tokens(self):
        return None

    async def load(self):
        return None

    async def healthy(self):
        return True

    async def close(self):
        pass


class ToyLaunched(InProcess):
    def __init__(self, model):
        self._model = model
        super().__init__(f"the vocabulary of {model}")

    def _load(self):
        return json.loads(Path(self._model.path, "config.json").read_text())["vocab_size"]

    def connect(self, *, version=0, replica=""):
        return ToyEngine(self._loaded.result(), version, replica)


def launch(config, place):
    return ToyLaunched(config.trainer.policy.model.pretrained)
'''
TOY = "generator.inference_engine.backend=toy"


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """Return a folder as pip fills it, with a package that has an engine."""
    folder = tmp_path / "site-packages"
    installed, package = folder / "toy_engine-1.0.dist-info", folder / "toy_engine"
    installed.mkdir(parents=True)
    package.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-engine\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[hpcrl.engines]\ntoy = toy_engine.backend:BACKEND\n")
    (package / "__init__.py").touch()
    (package / "backend.py").write_text(BACKEND)
    (package / "rollout.py").write_text(ROLLOUT)
    return folder


def submit(packages: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(packages), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "hpcrl.cli.main", "submit", str(QUICKSTART), *words]
    environment, place = os.environ | {"PYTHONPATH": path}, packages.parent
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.faults_slow
def test_a_run_generates_with_it(packages: Path) -> None:
    one_step = ["trainer.max_steps=1", "trainer.run_name=toy", "generator.on_logprob_mismatch=warn"]
    done = submit(packages, "--local", "--follow", *SMALL, *one_step, TOY)
    run = Run.open(packages.parent / "runs" / "quickstart" / "toy")
    assert done.returncode == 0, logs_of(run)
    assert len(require_samples(run, 1).groups) == 8
    made = {path.name for path in (packages / "toy_engine").glob("*.py")}
    assert made == {"__init__.py", "backend.py", "rollout.py"}, "all that an engine needs"


def test_what_it_does_not_do_is_refused(packages: Path) -> None:
    wrong = [
        "trainer.policy.model.lora.rank=8",
        "generator.inference_engine.tensor_parallel_size=2",
        "generator.sampling_params.additional_kwargs.min_tokens=2",
        "trainer.policy.experts.router_replay=R3",
    ]
    done = submit(packages, "--dry-run", TOY, *wrong)
    assert done.returncode == 2
    for words in (
        "trainer.policy.model.lora.rank: expected 0: a toy loads no adapters",
        'tensor_parallel_size: has no effect with generator.inference_engine.backend="toy"; leave it out, or set vllm',
        'additional_kwargs.min_tokens: generator.inference_engine.backend="toy" has none',
        'generator.inference_engine.backend="toy" does not record the experts of tokens',
    ):
        assert words in done.stderr, done.stderr


def test_an_engine_that_nobody_has_is_named(packages: Path) -> None:
    done = submit(packages, "--dry-run", TOY + "s", "trainer.distillation.backend=toy")
    assert done.returncode == 2
    assert 'backend: expected one of "vllm", "transformers", "diffusers", "toy", found "toys"' in done.stderr
    assert 'trainer.distillation.backend: expected one of "fsdp2", "megatron", "vllm", found "toy"' in done.stderr


def test_an_engine_that_cannot_be_loaded_is_named(packages: Path) -> None:
    (packages / "toy_engine" / "backend.py").write_text("BACKEND = 3\n")
    done = submit(packages, "--dry-run")
    assert done.returncode == 2
    assert "engine toy (entry point toy_engine.backend:BACKEND of the group hpcrl.engines)" in done.stderr
    assert "expected an object of a subclass of hpcrl.config.backend.Backend, found 3" in done.stderr
