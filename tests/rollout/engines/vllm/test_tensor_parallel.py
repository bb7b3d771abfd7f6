"""A replica whose weights are shared by two workers, as on two GPUs: what it says, new weights while it says it, and what each worker proves."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcrl.engines.vllm.client import EngineClient
from hpcrl.engines.vllm.processes import shared_memory
from hpcrl.engines.vllm.server import Server
from hpcrl.errors import EngineError
from hpcrl.rollout.engines.base import Engine, Generation
from hpcrl.rundir.commit import write_text
from hpcrl.runtime.token import bearer
from tests.rollout.conftest import runner
from tests.rollout.engines.test_contract import LENGTH, assert_close, updated_while_running
from tests.rollout.engines.vllm.test_weight_check import rewritten
from tests.rollout.material import (
    LONG_PROMPT,
    RUN_NAME,
    TOKEN,
    as_version,
    logprobs,
    make_model,
    options,
    probe_of,
    publish,
    served,
)

WHOLE = {"temperature": 1.0, "max_tokens": 24}


NUMACTL = """#!/bin/sh
echo "$@" >> "${0%/*}/calls"
while [ "${1#--}" != "$1" ]; do shift; done
exec "$@"
"""
"""In place of a program that may not be here: it binds nothing, and keeps what it was called with."""


@pytest.fixture(scope="module")
def two_ranks(token_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, list[Path]]]:
    """An engine of two tensor parallel ranks, and models that it can be."""
    folder = tmp_path_factory.mktemp("two")
    models = [make_model(folder / str(seed), seed, kv_heads=2) for seed in (0, 2)]
    given = options(str(models[0]), token_file)
    bound = {**given.engine.engine_init_kwargs, "numa_bind": True, "numa_bind_nodes": [0, 0]}
    given = replace(given, engine=replace(given.engine, tensor_parallel_size=2, engine_init_kwargs=bound))
    write_text(folder / "bin" / "numactl", NUMACTL, mode=0o700)
    with pytest.MonkeyPatch.context() as patched, ExitStack() as stack:
        patched.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
        server = stack.enter_context(served(given, folder / "engine.log"))
        calls = [line for line in (folder / "bin" / "calls").read_text().splitlines() if "spawn_main" in line]
        assert len(calls) == 3, "the core and two workers"
        assert all(call.startswith("--cpunodebind=0 --membind=0 ") for call in calls)
        made = shared_memory(server.pid)
        assert {name.partition("_")[0].partition("-")[0] for name in made} == {"psm", "sem.mp", "vllm"}
        yield server, models


def assert_says_what_models_do(server: Server, models: list[Path]) -> None:
    """Before, while and after an engine takes the second model for the first, its log-probabilities are those of transformers."""

    async def play(engine: Engine) -> tuple[list[Generation], list[Generation], list[Generation]]:
        first = await engine.generate(LONG_PROMPT, 4, 3, WHOLE)
        running = await updated_while_running(engine, models[1])
        return first, running, await engine.generate(LONG_PROMPT, 4, 3, WHOLE)

    first, running, later = runner(server, models[0])(play)
    for said, model in ((first, models[0]), (later, models[1])):
        for one in said:
            assert_close(one, model, LONG_PROMPT)
    for one in running:
        given_T, switch = torch.tensor(one.logprobs), one.versions.count(0)
        assert one.versions == [0] * switch + [1] * (LENGTH - switch)
        assert 0 < switch < LENGTH
        for part, model in ((slice(None, switch), models[0]), (slice(switch, None), models[1])):
            expected = logprobs(model, LONG_PROMPT, one.token_ids)[part]
            torch.testing.assert_close(given_T[part], expected, atol=1e-3, rtol=0)


@pytest.mark.faults_slow
def test_two_workers_share_the_weights(two_ranks: tuple[Server, list[Path]]) -> None:
    assert_says_what_models_do(*two_ranks)


@pytest.mark.faults_slow
def test_each_of_two_ranks_proves_what_it_has_loaded(two_ranks: tuple[Server, list[Path]], tmp_path: Path) -> None:
    server, models = two_ranks

    class OneBehind(EngineClient):
        """Gives the second rank what `others` says."""

        others: str

        async def _call(self, method: str, path: str, **request: Any) -> dict[str, Any]:
            if path == "/update_weights":
                info = request["json"]["update_info"]
                request["json"] = {"update_info": [info, {"path": self.others}]}
            return await super()._call(method, path, **request)

    class Unloaded(EngineClient):
        """Ends an update in which no rank was told what to load; vLLM takes it, and says that it has the version."""

        async def _call(self, method: str, path: str, **request: Any) -> dict[str, Any]:
            return {} if path == "/update_weights" else await super()._call(method, path, **request)

    async def main() -> None:
        engine = EngineClient(server.socket, bearer(TOKEN, RUN_NAME), replica="rollout-5")
        try:
            weights = publish(models[1], tmp_path / "v000001", 1, probe=probe_of(models[1]))
            await engine.update_weights(weights)
            found = await engine.probe(weights, "float32", None)
            assert found is not None
            assert 0 < found < 1e-4
            (said,) = await engine.generate(LONG_PROMPT, 1, 3, {"temperature": 1.0, "max_tokens": 8})
            expected = logprobs(models[1], LONG_PROMPT, said.token_ids)
            torch.testing.assert_close(torch.tensor(said.logprobs), expected, atol=1e-3, rtol=0)
            for wrong in list(weights.tensors)[:2]:
                damaged = publish(models[1], tmp_path / f"damaged-{wrong}", 2)
                rewritten(damaged, lambda tensors, name=wrong: tensors[name].add_(1.0))
                rank = list(weights.tensors).index(wrong) % 2
                with pytest.raises(EngineError, match=f"rank {rank} of 2 holds version 2, other .*: {wrong}$"):
                    await engine.update_weights(damaged)
            engine.__class__ = OneBehind
            assert isinstance(engine, OneBehind)
            engine.others = str(as_version(models[0], 0).path)
            with pytest.raises(EngineError, match=r"rollout-5 .* version 2, but its rank 1 of 2 holds version 0"):
                await engine.update_weights(as_version(models[1], 2))
            engine.__class__ = Unloaded
            with pytest.raises(EngineError, match=r"rollout-5 .* version 2, but its rank 0 of 2 has loaded nothing"):
                await engine.update_weights(as_version(models[1], 2))
        finally:
            await engine.close()

    asyncio.run(main())
