"""Replicas of several workers: each way in which they share a model says what transformers does, before, while and after new weights arrive."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from hpcrl.engines.vllm.client import EngineClient
from hpcrl.engines.vllm.middleware import CORES, on_each_core
from hpcrl.engines.vllm.processes import group_of
from hpcrl.engines.vllm.server import Server
from hpcrl.errors import EngineError
from tests.rollout.conftest import runner
from tests.rollout.engines.vllm.test_tensor_parallel import assert_says_what_models_do
from tests.rollout.material import (
    EOS,
    MAX_MODEL_LEN,
    QUICKSTART,
    VOCABULARY,
    as_version,
    make_model,
    options,
    probe_of,
    publish,
    served,
    wait_for,
)

Parallel = tuple[Server, list[Path], int, bool]
"""A server, models that it can be, how many workers it has, and whether it generates."""


def make_mixture(path: Path, seed: int) -> Path:
    """Write a random mixture of four experts, of which each token goes to two."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=False,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=EOS,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (path / name).write_bytes((QUICKSTART / name).read_bytes())
    return path


@dataclass(frozen=True)
class Layout:
    name: str
    settings: dict[str, int]
    mixture: bool = False
    generates: bool = True  # on a CPU: vLLM 0.31 takes weights there, and has no kernel to compute with them


LAYOUTS = [
    Layout("a mixture on one", {}, True),
    Layout("pipeline of two", {"pipeline_parallel_size": 2, "enforce_eager": False}),
    Layout("two copies", {"data_parallel_size": 2}),
    Layout("a mixture on two", {"tensor_parallel_size": 2}, True),
    Layout("experts whole on two", {"tensor_parallel_size": 2, "expert_parallel_size": 2}, True, False),
]


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda layout: layout.name.replace(" ", "-"))
def parallel(
    request: pytest.FixtureRequest, token_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Parallel]:
    """An engine of one or two workers, and models that it can be."""
    layout, folder = request.param, tmp_path_factory.mktemp("parallel")
    make = make_mixture if layout.mixture else lambda path, seed: make_model(path, seed, kv_heads=2)
    models = [make(folder / str(seed), seed) for seed in (0, 2)]
    given = options(str(models[0]), token_file)
    given = replace(given, engine=replace(given.engine, **layout.settings))
    with served(given, folder / "engine.log") as server:
        yield server, models, given.engine.gpus, layout.generates


@pytest.mark.slow
def test_workers_say_what_the_whole_model_does(parallel: Parallel) -> None:
    server, models, _, generates = parallel
    if not generates:
        pytest.skip("vLLM's build for CPUs does not compute this layout")

    assert_says_what_models_do(server, models)


@pytest.mark.slow
def test_each_worker_proves_what_it_has_loaded(parallel: Parallel, tmp_path: Path) -> None:
    server, models, workers, generates = parallel

    async def play(engine: EngineClient) -> None:
        weights = publish(models[1], tmp_path / "v000001", 1, probe=probe_of(models[1]))
        await engine.update_weights(weights)
        proofs = await engine._proofs("weight_proof")
        assert [(proof["rank"], proof["of"], proof["digest"]) for proof in proofs] == [
            (rank, workers, weights.digest) for rank in range(workers)
        ]
        if generates:
            found = await engine.probe(weights, "float32", None)
            assert found is not None
            assert 0 < found < 1e-4
        load = await engine.load()
        assert load is not None
        assert load.usage < 1
        (file,) = weights.path.glob("*.safetensors")
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        with pytest.raises(EngineError, match=r"rank \d of \d holds version 1, other tensors than were published"):
            await engine.update_weights(weights)

    runner(server, models[0])(play)


@pytest.mark.slow
def test_a_dead_core_of_several_is_noticed(parallel: Parallel) -> None:
    """The last test of each layout. The server itself goes on, and waits for it."""
    server, *_ = parallel
    cores = [pid for pid in group_of(server.pid) if "EngineCore" in (Path("/proc") / str(pid) / "cmdline").read_text()]
    if not cores:
        pytest.skip("the core is the server")
    assert server.alive()
    os.kill(cores[-1], signal.SIGKILL)
    wait_for(lambda: not server.alive(), 10, "the server goes on without a core")
    if len(cores) > 1:
        assert "one of its processes has ended" in str(server.failure("died"))


def test_all_engine_cores_are_asked() -> None:
    class Client:
        core_engines = (b"\0\0", b"\1\0")

        async def _call_utility_async(self, method: str, *args: Any, engine: bytes) -> Any:
            return method, args, self.core_engines.index(engine)

    class Engine:
        engine_core = Client()

    assert asyncio.run(on_each_core(Engine(), "reset_prefix_cache", [True])) == [
        ("reset_prefix_cache", (True,), 0),
        ("reset_prefix_cache", (True,), 1),
    ]


def test_ranks_of_several_copies_are_counted_on(models: list[Path]) -> None:
    weights = as_version(models[0], 0)

    class Copies(EngineClient):
        async def _call(self, method: str, path: str, **request: Any) -> dict[str, Any]:
            assert (method, path, request["json"]["method"]) == ("POST", CORES, "collective_rpc")
            proof = {"of": 2, "version": 0, "digest": weights.digest, "wrong": []}
            return {"results": [[{"rank": 0, **proof}, {"rank": 1, **proof}]] * 2}

    async def main() -> None:
        engine = Copies(Path("socket"), {})
        assert [(proof["rank"], proof["of"]) for proof in await engine._proofs("weight_proof")] == [
            (rank, 4) for rank in range(4)
        ]
        await engine.close()

    asyncio.run(main())
