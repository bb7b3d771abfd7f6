"""Engines that load adapters: log-probabilities are those of PEFT, also where a prompt is in a cache of another version."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from hpcrl.config import EnvironmentConfig, GeneratorConfig, SamplingParams
from hpcrl.config.sections.generator import ChatTemplateConfig
from hpcrl.config.sections.model import Pretrained
from hpcrl.data.cache_files import read_rows
from hpcrl.data.tokenizer import decoder, load_tokenizer
from hpcrl.data.weight_files import Probe, PublishedWeights, weight_facts
from hpcrl.engines.vllm.client import EngineClient
from hpcrl.errors import EngineError
from hpcrl.rollout.engines.base import Engine, Generation, Launched
from hpcrl.rollout.engines.tensors import read_tensors, replace_adapter
from hpcrl.rollout.generate import conversations
from hpcrl.rollout.worker import WorkerOptions, run_worker
from hpcrl.rundir.commit import begin, finish, is_committed, write_text
from hpcrl.rundir.layout import Run
from hpcrl.runtime.process_status import StatusWriter
from hpcrl.trainer.models.adapter import Adapted, Adapter
from hpcrl.types import Kind, Prompt, Work
from tests.paths import ON_GPU
from tests.rollout.controller import FakeController
from tests.rollout.material import (
    ENGINE,
    LONG_PROMPT,
    QUICKSTART,
    RUN_NAME,
    TOKEN,
    close,
    make_model,
    options,
    served,
    slowly,
    started,
    wait_for,
)

RANK = 4
WHOLE: dict[str, Any] = {"temperature": 1.0, "max_tokens": 24}
TESTS = [
    "test_versions_are_told_apart",
    "test_running_requests",
    "test_a_probe_is_computed_with_the_adapter",
    "test_a_version_that_a_request_kept_is_loaded_again",
    "test_old_and_new_versions_answer_side_by_side",
    "test_a_worker_evaluates_a_version_beside_the_newest",
]
TOKENIZER = load_tokenizer(Pretrained(str(QUICKSTART)), ChatTemplateConfig())
GENERATOR = GeneratorConfig(sampling_params=SamplingParams(max_generate_length=16))
RUNNING, LENGTH = 8, 120  # samples that an update meets


def _layers(model: Path) -> dict[str, torch.nn.Linear]:
    loaded = AutoModelForCausalLM.from_pretrained(model)
    return {
        name: layer
        for name, layer in loaded.named_modules()
        if isinstance(layer, torch.nn.Linear) and name != "lm_head"
    }


def publish_adapter(model: Path, target: Path, version: int, ranks: tuple[int, int] = (RANK, 2)) -> PublishedWeights:
    """Commit random adapters of a model's linear layers as the trainer does, of two ranks in turn."""
    generator = torch.Generator().manual_seed(version)
    layers = []
    for number, (name, layer) in enumerate(_layers(model).items()):
        rank = ranks[number % 2]
        A, B = (
            torch.randn(rank, layer.in_features, generator=generator),
            torch.randn(layer.out_features, rank, generator=generator),
        )
        layers.append(Adapted(name, A, B, 0.02 * (1 + number % 3), f"{name}.weight"))
    adapter = Adapter(layers, peft.LoraConfig(r=max(ranks), target_modules=[each.name for each in layers]))
    tensors = adapter.scaled(torch.float32).write(begin(target, 1))
    finish(target, 1, version=version, **weight_facts(tensors, None))
    return PublishedWeights.read(target)


def logprobs(model: Path, adapter: Path, said: list[int]) -> torch.Tensor:
    """Return PEFT's log-probabilities of tokens after the long prompt, [len(said)]."""
    policy = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), str(adapter)
    )
    with torch.no_grad():
        logits = policy(torch.tensor([[*LONG_PROMPT, *said]])).logits[0]
    return torch.log_softmax(logits, -1)[len(LONG_PROMPT) - 1 : -1].gather(1, torch.tensor(said)[:, None])[:, 0]


def is_of(said: Generation, model: Path, adapter: Path, tokens: slice = slice(None)) -> bool:
    """Check whether an engine's log-probabilities are PEFT's."""
    return close(torch.tensor(said.logprobs)[tokens], logprobs(model, adapter, said.token_ids)[tokens])


@pytest.fixture
def versions(models: list[Path], request: pytest.FixtureRequest) -> list[PublishedWeights]:
    """Three adapters of the first model, under numbers that no other test has."""
    first, folder = 1 + 3 * TESTS.index(request.function.__name__), models[0].parent / "adapters"
    places = {version: folder / f"v{version:06d}" for version in range(first, first + 3)}
    return [
        PublishedWeights.read(place) if is_committed(place) else publish_adapter(models[0], place, version)
        for version, place in places.items()
    ]


VLLM = pytest.param("vllm", marks=pytest.mark.faults_slow)


@pytest.fixture(scope="module", params=[VLLM, "transformers"])
def launched(
    request: pytest.FixtureRequest, models: list[Path], token_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Launched]:
    if request.param == "transformers":
        with started(models[0]) as embedded:
            yield embedded
    else:
        given = replace(options(str(models[0]), token_file), lora_rank=RANK, lora_slots=2)
        with served(given, tmp_path_factory.mktemp("log") / "engine.log") as server:
            yield server


def test_versions_are_told_apart(launched: Launched, models: list[Path], versions: list[PublishedWeights]) -> None:
    async def play() -> None:
        engine = launched.connect()
        for weights, other in pairwise([*versions, versions[0]]):
            measured = await engine.update_weights(weights)
            assert 0 < measured["weights/load_seconds"] < 5
            assert engine.version == weights.version
            for _ in range(2):  # the second may find the prompt in a cache
                for said in await engine.generate(LONG_PROMPT, 2, 8, WHOLE):
                    assert set(said.versions) == {weights.version}
                    assert is_of(said, models[0], weights.path)
                    assert not is_of(said, models[0], other.path)
        await engine.close()

    asyncio.run(play())


@pytest.mark.slow
@pytest.mark.skipif(
    ON_GPU and torch.cuda.device_count() < 2, reason="there is one GPU, and tensor parallelism needs two"
)
def test_two_workers_share_both_matrices(token_file: Path, tmp_path: Path) -> None:
    """fully_sharded_loras: what vLLM's workers compute together is what PEFT computes."""
    model = make_model(tmp_path / "model", 0, kv_heads=2)
    versions = [publish_adapter(model, tmp_path / f"v{version:06d}", version) for version in (1, 2)]
    given = replace(options(str(model), token_file), lora_rank=RANK, lora_slots=2)
    given = replace(given, engine=replace(given.engine, tensor_parallel_size=2, fully_sharded_loras=True))

    async def play() -> None:
        engine = server.connect()
        for weights in versions:
            await engine.update_weights(weights)
            for said in await engine.generate(LONG_PROMPT, 2, 8, WHOLE):
                assert set(said.versions) == {weights.version}
                assert is_of(said, model, weights.path)
        await engine.close()

    with served(given, tmp_path / "engine.log") as server:
        asyncio.run(play())


def test_running_requests(launched: Launched, models: list[Path], versions: list[PublishedWeights]) -> None:
    """vLLM's go on with the adapter that they began with, and it is dropped afterwards; the embedded engine's go on with the new one."""
    first, second, third = versions

    async def play() -> list[Generation]:
        engine = launched.connect()
        await engine.update_weights(first)
        said = await _updated_while_running(engine, second, models[0])
        await engine.update_weights(third)
        if isinstance(engine, EngineClient):
            assert [[len(numbers) for numbers in ranks] for ranks in await engine._on_each_rank("list_loras")] == [[1]]
        await engine.close()
        return said

    for said in asyncio.run(play()):
        switch = said.versions.count(first.version)
        assert said.versions == [first.version] * switch + [second.version] * (LENGTH - switch)
        assert (switch == LENGTH) == (type(launched).__name__ == "Server")
        assert switch > 0
        assert is_of(said, models[0], first.path, slice(switch))
        assert is_of(said, models[0], second.path, slice(switch, None))


def test_a_version_that_a_request_kept_is_loaded_again(
    launched: Launched, models: list[Path], versions: list[PublishedWeights]
) -> None:
    """A worker goes back to rows that a lost one left: vLLM may have the adapter still."""
    first, second, _ = versions

    async def play() -> None:
        engine = launched.connect()
        await engine.update_weights(first)
        await _updated_while_running(engine, second, models[0])
        await engine.update_weights(first)
        (said,) = await engine.generate(LONG_PROMPT, 1, 8, WHOLE)
        assert set(said.versions) == {first.version}
        assert is_of(said, models[0], first.path)
        await engine.close()

    asyncio.run(play())


def test_old_and_new_versions_answer_side_by_side(
    launched: Launched, models: list[Path], versions: list[PublishedWeights]
) -> None:
    first, second, third = versions

    async def play() -> None:
        engine = launched.connect()
        await engine.update_weights(second)
        if not isinstance(engine, EngineClient):
            assert (engine.serves_versions, engine.holds(first.version)) == (False, False)
            return await engine.close()
        engine.evaluated = lambda: [first.version]
        await engine.add_version(first)
        assert engine.version == second.version
        for newest in (second, third):
            if newest is third:
                await engine.update_weights(third)
            old, new = await asyncio.gather(
                engine.of_version(first.version)(LONG_PROMPT, 2, 8, WHOLE), engine.generate(LONG_PROMPT, 2, 8, WHOLE)
            )
            for said, weights in [*((one, first) for one in old), *((one, newest) for one in new)]:
                assert set(said.versions) == {weights.version}
                assert is_of(said, models[0], weights.path)
        assert engine.holds(0), "the model that it was started with"
        (said,) = await engine.of_version(0)(LONG_PROMPT, 1, 8, WHOLE)
        assert set(said.versions) == {0}
        assert not is_of(said, models[0], third.path)
        engine.evaluated = list
        await engine.update_weights(third)
        assert not engine.holds(first.version)
        return await engine.close()

    asyncio.run(play())


@pytest.mark.parametrize("launched", [VLLM], indirect=True)
def test_a_worker_evaluates_a_version_beside_the_newest(
    launched: Launched, models: list[Path], versions: list[PublishedWeights], tmp_path: Path
) -> None:
    """Also one that its engine has never had; the update in between waits for no row."""
    old, first, newest = (weights.version for weights in versions)
    run = Run(tmp_path / RUN_NAME)
    write_text(run.token, TOKEN + "\n", mode=0o600)
    for version in (old, first, newest):
        publish_adapter(models[0], run.weights_of(version), version)
    options = WorkerOptions(run, 1, 5, 8, n_samples=4, dump_evals=False, engine_dtype="float32")
    maker = conversations(TOKENIZER, GENERATOR, EnvironmentConfig(), replica=5)
    status = StatusWriter(run, "rollout-5", 1)
    work = [("g1", "train", None), ("e1", "eval", old), ("e2", "eval", first)]

    def worker() -> None:
        asyncio.run(run_worker(options, launched, maker, decoder(TOKENIZER), status))

    with FakeController().served(run, 1) as controller, ThreadPoolExecutor() as threads:
        running = threads.submit(worker)
        try:
            for version in (first, newest):
                controller.version = version
                wait_for(lambda v=version: controller.claims and controller.claims[-1]["version"] == v, 120, "no claim")
                controller.work.extend(_item(f"{name}-{version}", kind, of) for name, kind, of in work)
                wait_for(lambda v=version: len(controller.completed) == (3 if v == first else 6), 120, "no groups")
        finally:
            controller.stop = "finished"
            running.result(60)
    assert all(claim["any_version"] for claim in controller.claims)
    found = {meta.group_id: (meta.oldest_version, meta.newest_version) for meta in controller.completed}
    assert {name: one for name, (one, other) in found.items() if one == other} == {
        f"{name}-{version}": of or version for version in (first, newest) for name, _, of in work
    }
    proven = {row.group.group_id: row.weights for of in (old, first) for row in read_rows(run.eval_rows(of, 5))[0]}
    digests = {of: PublishedWeights.read(run.weights_of(of)).digest for of in (old, first)}
    assert proven == {f"e{at}-{v}": digests[of] for v in (first, newest) for at, of in ((1, old), (2, first))}


def _item(name: str, kind: Kind, version: int | None) -> Work:
    extras = {"reward_spec": {"ground_truth": "abc"}}
    prompt = Prompt(name, [{"role": "user", "content": "sort: bca"}], "sort_letters", extras, "letters")
    return Work(name, kind, prompt, 4, seed=3, asked=kind, version=version)


async def _updated_while_running(engine: Engine, newer: PublishedWeights, model: Path) -> list[Generation]:
    sampling = {"temperature": 1.0, "max_tokens": LENGTH, "ignore_eos": True}
    begun = await engine.tokens() or 0
    with slowly(model):
        running = asyncio.create_task(engine.generate(LONG_PROMPT, RUNNING, 9, sampling))
        while (await engine.tokens() or 0) < begun + RUNNING * 10:
            await asyncio.sleep(0.01)
        await engine.update_weights(newer)
        (later,) = await engine.generate(LONG_PROMPT, 1, 9, {**sampling, "max_tokens": 4})
        assert later.versions == [newer.version] * 4
    return await running


def test_a_probe_is_computed_with_the_adapter(
    launched: Launched, models: list[Path], versions: list[PublishedWeights]
) -> None:
    def with_probe(weights: PublishedWeights, of: PublishedWeights) -> PublishedWeights:
        tokens = [*LONG_PROMPT, 5, 6, 7]
        return replace(weights, probe=Probe(tokens[-4:], _after_first(models[0], of.path, tokens[-4:]), "float32"))

    async def play() -> None:
        engine = launched.connect()
        await engine.update_weights(versions[0])
        found = await engine.probe(with_probe(versions[0], versions[0]), ENGINE.model_dtype, None)
        assert found is not None
        with pytest.raises(EngineError, match="does not compute what the trainer does"):
            await engine.probe(with_probe(versions[0], versions[1]), ENGINE.model_dtype, None)
        await engine.close()

    asyncio.run(play())


def _after_first(model: Path, adapter: Path, tokens: list[int]) -> list[float]:
    policy = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), str(adapter)
    )
    with torch.no_grad():
        logits = cast(Any, policy)(torch.tensor([tokens])).logits[0, :-1]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens)[1:, None])[:, 0].tolist()


def test_an_adapter_that_the_engine_cannot_take(launched: Launched, models: list[Path], tmp_path: Path) -> None:
    too_large = publish_adapter(models[0], tmp_path / "v001000", 1000, (2 * RANK, 40))

    async def play() -> None:
        engine = launched.connect()
        try:
            with pytest.raises(EngineError, match=r"rank|shape|size"):
                await engine.update_weights(too_large)
        finally:
            await engine.close()

    asyncio.run(play())


def test_parameters_of_an_adapter_can_be_moved(models: list[Path], tmp_path: Path) -> None:
    """In turns with a trainer an engine's go to host memory and back, which those that inference mode has made cannot."""
    weights = publish_adapter(models[0], tmp_path / "v000001", 1)
    model = AutoModelForCausalLM.from_pretrained(models[0])
    replace_adapter(model, read_tensors(weights)[0], weights.path)
    adapted = [parameter for name, parameter in model.named_parameters() if ".lora_" in name]
    assert adapted
    assert not any(parameter.is_inference() for parameter in adapted)
