"""The embedded engine against transformers: rows of all lengths that come and go, in few passes and in many, of several kinds of models."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from hpcrl.engines.embedded.batch import DecodingBatch
from hpcrl.engines.embedded.compute import Compute, Limits
from hpcrl.engines.embedded.sampling import Sampling
from hpcrl.errors import EngineError
from hpcrl.rollout.engines.base import Engine, Generation
from tests.rollout.material import (
    EOS,
    LONG_PROMPT,
    MAX_MODEL_LEN,
    PROMPT,
    QUICKSTART,
    VOCABULARY,
    break_head,
    logprobs,
    publish,
    started,
)

LONG: dict[str, Any] = {"temperature": 1.0, "max_tokens": 40, "ignore_eos": True}
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": MAX_MODEL_LEN,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": EOS,
}


def saved(model: PreTrainedModel, path: Path) -> Path:
    model.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((QUICKSTART / name).read_bytes())
    return path


async def staggered(engine: Engine) -> list[tuple[list[int], Generation]]:
    """Return what is said to prompts of many lengths, of which the later ones come while the first are under way."""
    prompts = [PROMPT, LONG_PROMPT, [4], LONG_PROMPT[:40], PROMPT[:2]]

    async def one(number: int, prompt: list[int]) -> list[tuple[list[int], Generation]]:
        begun = await engine.tokens() or 0
        while number and (await engine.tokens() or 0) < begun + 5 * number:
            await asyncio.sleep(0)
        options = {**LONG, "max_tokens": 10 + 30 * (number % 3)}
        return [(prompt, said) for said in await engine.generate(prompt, 3, 7 + number, options)]

    found = await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts)))
    return [pair for group in found for pair in group]


@pytest.mark.parametrize("engine", [{}, {"max_num_batched_tokens": 60}, {"max_num_seqs": 4}], ids=str)
def test_rows_that_come_and_go(models: list[Path], engine: dict[str, Any]) -> None:
    with started(models[0], **engine) as launched:
        said = asyncio.run(staggered(launched.connect()))
        alone = asyncio.run(launched.connect().generate(LONG_PROMPT, 3, 8, {**LONG}))
    assert len(said) == 15
    for prompt, one in said:
        assert set(one.versions) == {0}
        torch.testing.assert_close(
            torch.tensor(one.logprobs), logprobs(models[0], prompt, one.token_ids), atol=1e-4, rtol=0
        )
    assert [one.token_ids for one in alone] == [one.token_ids for prompt, one in said if prompt == LONG_PROMPT]


def test_requests_that_are_made_together_share_their_passes(models: list[Path]) -> None:
    model, passes = AutoModelForCausalLM.from_pretrained(models[0]), list[torch.Size]()
    model.register_forward_pre_hook(
        lambda _module, _args, given: passes.append(given["input_ids"].shape), with_kwargs=True
    )
    compute = Compute(DecodingBatch(model, [], str, prefill_tokens=10_000), Limits(100, 10_000, 100))
    found = []
    for _ in range(40):  # on a busy machine one may come late now and then
        passes.clear()
        asked = []
        for number in range(4):
            asked.append(compute.generate(PROMPT, [number], Sampling(max_tokens=1)))
            time.sleep(0.0002)
        assert all(len(request.responses.result(60)) == 1 for request in asked)
        found.append(len(passes))
    compute.end()
    assert median(found) == 1


def test_greedy_is_what_transformers_says(models: list[Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(models[0])
    with started(models[0]) as launched:
        for prompt in (PROMPT, LONG_PROMPT, [4, 5]):
            (said,) = asyncio.run(launched.connect().generate(prompt, 1, 0, {"temperature": 0.0, "max_tokens": 50}))
            expected = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=50)[0, len(prompt) :]
            assert said.token_ids == expected.tolist()


def test_new_weights_reach_rows_in_parts(models: list[Path], tmp_path: Path) -> None:
    """Their caches are computed again in several passes, and those of a kept one are not."""
    newer = publish(models[1], tmp_path / "v000001", 1)

    async def play(engine: Engine) -> list[Generation]:
        running = asyncio.create_task(engine.generate(LONG_PROMPT, 8, 3, {**LONG, "max_tokens": 600}))
        while (await engine.tokens() or 0) < 8 * 20:
            await asyncio.sleep(0.001)
        await engine.update_weights(newer)
        return await running

    for keep in (False, True):
        with started(models[0], max_num_batched_tokens=300, keep_cache_on_update=keep) as launched:
            said = asyncio.run(play(launched.connect()))
        for one in said:
            old, new = (logprobs(model, LONG_PROMPT, one.token_ids) for model in models[:2])
            switch, given = one.versions.count(0), torch.tensor(one.logprobs)
            assert 0 < switch < 600
            assert one.versions == [0] * switch + [1] * (600 - switch)
            torch.testing.assert_close(given[:switch], old[:switch], atol=1e-4, rtol=0)
            assert bool((given - new)[switch:].abs().max() < 1e-4) is not keep


def test_a_request_that_has_no_room_waits(models: list[Path]) -> None:
    async def play(engine: Engine) -> None:
        first = asyncio.create_task(engine.generate(PROMPT, 4, 1, {**LONG, "max_tokens": 500}))
        second = asyncio.create_task(engine.generate(PROMPT, 3, 1, LONG))
        while not (await engine.tokens() or 0):
            await asyncio.sleep(0)
        load = await engine.load()
        assert load is not None
        assert (load.usage, load.waiting) == (0.8, 1)
        assert engine.waiting == ["generate"]
        ended = list[str]()  # this thread may see both at once
        first.add_done_callback(lambda _: ended.append("first"))
        second.add_done_callback(lambda _: ended.append("second"))
        await asyncio.gather(first, second)
        assert ended == ["first", "second"]

    with started(models[0], max_num_seqs=5) as launched:
        asyncio.run(play(launched.connect()))


def test_a_request_that_nobody_waits_for_is_given_up(models: list[Path]) -> None:
    async def play(engine: Engine) -> None:
        kept = asyncio.create_task(engine.generate(PROMPT, 2, 1, {**LONG, "max_tokens": 300}))
        under_way = asyncio.create_task(engine.generate(PROMPT, 30, 9, {**LONG, "max_tokens": 600}))
        waits = asyncio.create_task(engine.generate(PROMPT, 30, 9, {**LONG, "max_tokens": 600}))
        while (await engine.tokens() or 0) < 100:
            await asyncio.sleep(0)
        for task in (under_way, waits):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert [len(said.token_ids) for said in await kept] == [300, 300]
        assert engine.waiting == []
        assert await engine.healthy()
        tokens = await engine.tokens()
        assert tokens is not None
        assert tokens < 30 * 300, "those rows went on"

    with started(models[0], max_num_seqs=40) as launched:
        asyncio.run(play(launched.connect()))


def test_an_engine_that_is_stopped_computes_no_more(models: list[Path]) -> None:
    """A thread inside of torch aborts an interpreter that ends."""

    def engines() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "engine"}

    async def begin(engine: Engine) -> None:
        request = asyncio.create_task(engine.generate(PROMPT, 30, 1, {**LONG, "max_tokens": 600}))
        while not (await engine.tokens() or 0):
            await asyncio.sleep(0)
        request.cancel()

    before = engines()
    with started(models[0], max_num_seqs=40) as launched:
        asyncio.run(begin(launched.connect()))
    assert not engines() - before


def gemma(path: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**SIZES, sliding_window=9, layer_types=kinds, query_pre_attn_scalar=16)
    return saved(Gemma3ForCausalLM(config), path)


def mixture(path: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
    return saved(Qwen3MoeForCausalLM(config), path)


@pytest.mark.parametrize("make", [gemma, mixture])
def test_other_kinds_of_models(tmp_path: Path, make: Any) -> None:
    """Layers that look back a few tokens only; experts that are one tensor each on disk and all in one in memory."""
    paths = [make(tmp_path / str(seed), seed) for seed in (0, 1)]

    async def play(engine: Engine) -> list[tuple[list[int], Generation]]:
        await engine.update_weights(publish(paths[1], tmp_path / "v000001", 1))
        return await staggered(engine)

    with started(paths[0]) as launched:
        said = asyncio.run(play(launched.connect()))
    model = AutoModelForCausalLM.from_pretrained(paths[1], dtype=torch.float32)
    for prompt, one in said:
        with torch.no_grad():
            logits_TV = model(torch.tensor([prompt + one.token_ids])).logits[0]
        expected = torch.log_softmax(logits_TV, -1)[len(prompt) - 1 : -1].gather(
            1, torch.tensor(one.token_ids)[:, None]
        )
        torch.testing.assert_close(torch.tensor(one.logprobs), expected[:, 0], atol=1e-4, rtol=0)


def test_a_model_whose_state_is_no_cache(tmp_path: Path) -> None:
    sizes = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "eos_token_id")}
    path = saved(MambaForCausalLM(MambaConfig(**sizes, state_size=4)), tmp_path / "model")
    with pytest.raises(EngineError, match=r"MambaConfig has layers of another kind: .*backend to vllm"), started(path):
        pass


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=rf"the model at {tmp_path} cannot be loaded"), started(tmp_path):
        pass


def test_weights_of_another_model(models: list[Path], tmp_path: Path) -> None:
    other = publish(gemma(tmp_path / "gemma", 0), tmp_path / "v000001", 1)
    with started(models[0]) as launched:
        engine = launched.connect()
        with pytest.raises(EngineError, match=r"v000001 lacks .*weight"):
            asyncio.run(engine.update_weights(other))
        assert engine.version == 0


def test_what_computes_fails(models: list[Path]) -> None:
    """Requests that wait get the error, and later ones too."""
    with started(models[0]) as launched:
        engine = launched.connect()
        break_head(launched)
        with pytest.raises(EngineError, match="failed in generate: RuntimeError"):
            asyncio.run(engine.generate(PROMPT, 1, 1, LONG))
        assert not launched.alive()
        assert "RuntimeError" in str(launched.failure("died"))
        with pytest.raises(EngineError, match="failed in generate: RuntimeError"):
            asyncio.run(engine.generate(PROMPT, 1, 1, LONG))


def test_with_deterministic_a_response_has_the_same_bits_whatever_else_is_generated(models: list[Path]) -> None:
    """Alone, as one of its group, beside requests of other lengths, and by another number of threads."""

    async def beside(engine: Engine) -> list[list[Generation]]:
        return await asyncio.gather(
            engine.generate(PROMPT, 3, 8, LONG),
            engine.generate(LONG_PROMPT, 3, 8, LONG),
            engine.generate([4], 2, 1, LONG),
        )

    async def alone(engine: Engine) -> list[list[Generation]]:
        return [[one for seed in (8, 9, 10) for one in await engine.generate(LONG_PROMPT, 1, seed, LONG)]]

    threads = torch.get_num_threads()
    try:
        with started(models[0], deterministic=True) as launched:
            _, together, _ = asyncio.run(beside(launched.connect()))
            (apart,) = asyncio.run(alone(launched.connect()))
            _, compute = launched._loaded.result()
            assert compute.between_tokens(torch.get_num_threads).result(60) == 1
    finally:
        torch.set_num_threads(threads)
    assert together == apart
    assert len({tuple(one.token_ids) for one in together}) == 3
