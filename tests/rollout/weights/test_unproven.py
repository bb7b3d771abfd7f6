"""What was finished under weights whose proof fails stays with the worker that ends of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config import EnvironmentConfig, GeneratorConfig, SamplingParams
from hpcrl.config.sections.model import Pretrained
from hpcrl.data.tokenizer import decoder, load_tokenizer
from hpcrl.data.weight_files import PublishedWeights
from hpcrl.engines.vllm.client import EngineClient
from hpcrl.engines.vllm.server import Server
from hpcrl.errors import EngineError
from hpcrl.rollout.generate import GroupGenerator
from hpcrl.rollout.worker import Worker, WorkerOptions
from hpcrl.rundir.commit import write_text
from hpcrl.rundir.layout import Run
from hpcrl.runtime.process_status import StatusWriter
from hpcrl.runtime.token import bearer
from hpcrl.types import Prompt, Work
from tests.rollout.conftest import WithEngine
from tests.rollout.controller import FakeController
from tests.rollout.environments import Stuck
from tests.rollout.material import QUICKSTART, RUN_NAME, TOKEN, probe_of, publish

GENERATOR = GeneratorConfig(sampling_params=SamplingParams(max_generate_length=40))
ATTEMPT, NAMES = 2, ("g1", "g2")


class LateProof(EngineClient):
    """Proves a version once groups are finished that began before it."""

    worker: Worker

    async def probe(self, weights: PublishedWeights, dtype: str, allowed: float | None) -> float | None:
        Stuck.go.set()
        while len(self.worker._finished) < len(NAMES):
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.5)  # in which the worker would hand them over
        return await super().probe(weights, dtype, allowed)


def item(name: str) -> Work:
    prompt = Prompt(name, [{"role": "user", "content": "sort: bca"}], "tests.rollout.environments:Stuck", {}, "letters")
    return Work(name, "train", prompt, 4, seed=1)


@pytest.fixture
def run(with_engine: WithEngine[Any], tmp_path: Path) -> Run:
    async def nothing(_engine: EngineClient) -> None: ...

    with_engine(nothing)  # version 0 again
    run = Run(tmp_path / RUN_NAME)
    write_text(run.token, TOKEN + "\n", mode=0o600)
    return run


async def work(run: Run, server: Server, engine: LateProof | GoesBack) -> None:
    """Run a worker until the controller stops it."""
    tokenizer = load_tokenizer(Pretrained(str(QUICKSTART)), GENERATOR.chat_template)
    options = WorkerOptions(run, ATTEMPT, 5, 4, n_samples=4, dump_evals=True, engine_dtype="float32")
    status = StatusWriter(run, "rollout-5", ATTEMPT)
    generator = GroupGenerator(engine, tokenizer, GENERATOR, EnvironmentConfig())
    try:
        engine.worker = Worker(options, server, engine, generator, status, decoder(tokenizer))
        await engine.worker.run()
    finally:
        await engine.close()


def test_no_group_that_was_finished_under_unproven_weights_is_handed_over(
    run: Run, server: Server, models: list[Path]
) -> None:
    publish(models[1], run.weights_of(1), 1, ATTEMPT, probe=probe_of(models[2]))
    Stuck.go.clear()

    async def main() -> None:
        await work(run, server, LateProof(server.socket, bearer(TOKEN, RUN_NAME), replica="rollout-5"))

    with FakeController().served(run, ATTEMPT) as controller:
        controller.work.extend(map(item, NAMES))
        controller.version = 1  # named by the same answer that hands out the work
        with pytest.raises(EngineError, match=r"rollout-5 does not compute what the trainer does .* of version 1"):
            asyncio.run(main())
    assert controller.completed == []
    assert not list(run.samples_of(5).glob("*"))


class GoesBack(EngineClient):
    """Loads version 1 after version 2, and meanwhile a report is answered with version 2 again."""

    worker: Worker
    controller: FakeController
    claims = 0

    async def update_weights(self, weights: PublishedWeights) -> dict[str, float]:
        if weights.version == 2:
            known = await super().update_weights(weights)
            self.controller.version = 1
            return known
        claims, reports = len(self.controller.claims), len(self.controller.reports)
        self.controller.version = 2
        self.controller.work.append(item("g1"))
        while len(self.controller.reports) < reports + 2 and self.worker._stop is None:
            await asyncio.sleep(0.05)
        self.claims = len(self.controller.claims) - claims
        self.controller.stop = "finished"
        return await super().update_weights(weights)


def test_nothing_is_claimed_while_another_version_is_loaded(run: Run, server: Server, models: list[Path]) -> None:
    """The engine still names the version before, which is not what groups of the claim would be generated with."""
    for version in (1, 2):
        publish(models[version], run.weights_of(version), version, ATTEMPT, probe=probe_of(models[version]))

    async def main() -> int:
        engine = GoesBack(server.socket, bearer(TOKEN, RUN_NAME), replica="rollout-5")
        engine.controller = controller
        await work(run, server, engine)
        return engine.claims

    Stuck.go.set()
    with FakeController().served(run, ATTEMPT) as controller:
        controller.version = 2
        assert asyncio.run(main()) == 0
    assert controller.completed == []
