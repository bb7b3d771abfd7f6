"""An engine whose weights are quantized as they arrive: it is near the trainer with each version, and far from it with any other."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hpcrl.engines.vllm.server import Server
from hpcrl.errors import EngineError
from hpcrl.rollout.engines.weight_check import TOLERANCES
from tests.rollout.material import LONG_PROMPT, make_model, options, probe_of, publish, served

KIND = "fp8_per_channel"  # the only one that vLLM's build for CPUs has all operations of


@pytest.fixture(scope="module")
def quantized(token_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, list[Path]]]:
    folder = tmp_path_factory.mktemp("quantized")
    models = [make_model(folder / str(seed), seed) for seed in (0, 2)]
    given = options(str(models[0]), token_file)
    given = replace(given, engine=replace(given.engine, quantization=KIND, model_dtype="bfloat16"))
    with served(given, folder / "engine.log") as server:
        yield server, models


@pytest.mark.slow
def test_weights_are_quantized_at_the_start_and_when_they_arrive(
    quantized: tuple[Server, list[Path]], tmp_path: Path
) -> None:
    server, models = quantized
    first, second = (
        publish(model, tmp_path / f"v{version:06d}", version, probe=probe_of(model))
        for version, model in enumerate(models)
    )

    async def play() -> None:
        engine = server.connect()
        try:
            at_start = await engine.probe(first, KIND, None)
            await engine.update_weights(second)
            arrived = await engine.probe(second, KIND, None)
            assert at_start is not None
            assert arrived is not None
            assert 0.05 < at_start < TOLERANCES[KIND], "farther than rounding to bfloat16 alone"
            assert 0.05 < arrived < TOLERANCES[KIND]
            with pytest.raises(
                EngineError, match="does not compute what the trainer does with the weights of version 0"
            ):
                await engine.probe(first, KIND, None)
            await engine.update_weights(first)
            assert await engine.probe(first, KIND, None) == pytest.approx(at_start, abs=1e-3), "as when it was loaded"
            (said,) = await engine.generate(LONG_PROMPT, 1, 3, {"temperature": 1.0, "max_tokens": 8})
            assert said.versions == [0] * len(said.token_ids)
        finally:
            await engine.close()

    asyncio.run(play())
