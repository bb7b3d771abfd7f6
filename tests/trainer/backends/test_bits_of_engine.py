"""With trainer.deterministic an FSDP2 trainer computes the embedded engine's log-probabilities to the last bit, on CPUs."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from hpcrl.config.rules.determinism import has_bits_of_engine
from hpcrl.data.weight_files import PublishedWeights
from hpcrl.engines.embedded.rollout import Embedded
from hpcrl.rollout.engines.base import Engine, Generation
from hpcrl.trainer.backends.fsdp.engine import FsdpPolicy
from hpcrl.trainer.distributed import World
from hpcrl.trainer.packing import PackedRows, pack
from hpcrl.types import MicroBatch, Row
from tests.rollout.engines.test_adapters import publish_adapter
from tests.rollout.material import START_S, embedded_options
from tests.trainer.material import QUICKSTART, write_model
from tests.trainer.ranks import Ranks
from tests.trainer.scenarios import make_engine

TEMPERATURE = 0.9  # of make_engine
PROMPTS = [[4], [5, 9, 3, 12, 8, 2, 7], [3 + at % 14 for at in range(45)]]
SAMPLING: dict[str, Any] = {"temperature": TEMPERATURE, "max_tokens": 70, "ignore_eos": True}
DETERMINISTIC = {"trainer": {"deterministic": True}}


def generated(
    model: Path, prompts: list[list[int]], adapter: PublishedWeights | None = None
) -> list[tuple[list[int], Generation]]:
    """Return responses over several blocks, with the engine's own log-probabilities."""

    async def play(engine: Engine) -> list[tuple[list[int], Generation]]:
        if adapter:
            await engine.update_weights(adapter)
            assert not any(type(one) is torch.nn.Linear for one in cast(Any, engine)._model.modules())
        groups = [(prompt, await engine.generate(prompt, 2, 5, SAMPLING)) for prompt in prompts]
        return [(prompt, one) for prompt, group in groups for one in group]

    engine = Embedded(replace(embedded_options(model), deterministic=True, in_blocks=True))
    threads = torch.get_num_threads()
    try:
        engine.wait_ready(START_S)
        return asyncio.run(play(engine.connect()))
    finally:
        engine.stop()
        torch.set_num_threads(threads)


def packed(samples: list[tuple[list[int], list[int], list[float]]]) -> PackedRows:
    def row(prompt: list[int], response: list[int], logprobs: list[float]) -> Row:
        before = torch.zeros(len(prompt))
        return Row(
            token_ids=torch.tensor(prompt + response),
            loss_mask=torch.cat([before, torch.ones(len(response))]),
            rollout_logprobs=torch.cat([before, torch.tensor(logprobs)]),
            versions=torch.cat([before - 1, torch.zeros(len(response))]).int(),
            rewards=torch.zeros(len(prompt) + len(response)),
            stop_reason="length",
        )

    return pack([row(*sample) for sample in samples])


def largest_differences(engine: FsdpPolicy, rows: PackedRows) -> list[float]:
    """Return how far a pass without gradients and one with them are from the engine's log-probabilities."""
    batch, found = rows.whole(), list[float]()
    said = batch.loss_mask > 0

    def difference(of: MicroBatch, logprobs_P: torch.Tensor) -> None:
        found.append(float((logprobs_P.detach() - of.rollout_logprobs)[said].abs().max()))

    def objective(of: MicroBatch, logprobs_P: torch.Tensor, *_: torch.Tensor) -> Any:
        difference(of, logprobs_P)
        return -(logprobs_P * of.loss_mask).sum(), {}

    (scored_P,) = engine.logprobs([batch])
    difference(batch, scored_P)
    engine.forward_backward([batch], objective)
    return found


def differences(world: World, options: dict[str, Any]) -> None:
    samples, engine = options["samples"], make_engine(world, options["model"], options)
    found = largest_differences(engine, packed(samples[world.rank :: world.size]))
    everyone = world.all_gather(lambda: found)
    if world.first:
        Path(options["out"]).write_text(json.dumps(everyone))


def test_one_rank_and_two_have_the_bits_of_the_engine(alone: World, two: Ranks, tmp_path: Path) -> None:
    """Sizes that are no multiples of a block or of a vector, prompts and responses across blocks, and any number of threads of the trainer."""
    model = write_model(tmp_path / "model")
    samples = [(prompt, said.token_ids, said.logprobs) for prompt, said in generated(model, PROMPTS)]
    options = {"model": str(model), "samples": samples, "out": str(tmp_path / "found.json"), **DETERMINISTIC}
    differences(alone, options)
    assert json.loads((tmp_path / "found.json").read_text()) == [[0.0, 0.0]]
    two.play([("backends.test_bits_of_engine:differences", options)])
    assert json.loads((tmp_path / "found.json").read_text()) == [[0.0, 0.0]] * 2
    differences(alone, options | {"trainer": {"deterministic": False}})
    assert max(json.loads((tmp_path / "found.json").read_text())[0]) > 0, "the bits are the same without blocks"


def test_adapters_have_the_bits_of_an_engine_that_loads_them(alone: World, tmp_path: Path) -> None:
    """The trainer scales what they add by 4, the engine has matrices that are scaled."""
    model = write_model(tmp_path / "model")
    wide = Qwen2Config.from_pretrained(model)
    wide.hidden_size = 256  # sums of few numbers have the same bits in blocks and without
    Qwen2ForCausalLM(wide).save_pretrained(model)
    adapter = publish_adapter(model, tmp_path / "adapter", 1, ranks=(4, 4))
    samples = [(prompt, said.token_ids, said.logprobs) for prompt, said in generated(model, PROMPTS[2:], adapter)]
    lora = {"rank": 4, "alpha": 16.0, "adapter_path": str(adapter.path)}
    for deterministic in (True, False):
        trainer = {"deterministic": deterministic, "policy": {"model": {"lora": lora}}}
        found = largest_differences(make_engine(alone, str(model), {"trainer": trainer}), packed(samples))
        assert (max(found) == 0) == deterministic, found
    without = largest_differences(make_engine(alone, str(model), DETERMINISTIC), packed(samples))
    assert min(without) > 0.01, "the adapter changes nothing"


def test_gradients_are_those_of_whole_matrices(alone: World) -> None:
    samples = [(prompt, prompt, [0.0] * len(prompt)) for prompt in PROMPTS]
    norms = list[float]()
    for deterministic in (True, False):
        engine = make_engine(alone, str(QUICKSTART), {"trainer": {"deterministic": deterministic}})
        largest_differences(engine, packed(samples))
        norms.append(engine.step().grad_norm)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"deterministic": False},
        {"use_sample_packing": False},
        {"shared_prefixes": True},
        {"policy": {"sequence_parallel_size": 2}},
        {"policy": {"compile_model": True}},
        {"policy": {"use_torch_compile": True}},
        {"policy": {"model": {"lora": {"rank": 4, "alpha": 12.0}}}},
        {"policy": {"model": {"lora": {"rank": 4, "dropout": 0.1}}}},
        {"policy": {"model": {"lora": {"rank": 4, "modules_to_save": ["embed_tokens"]}}}},
    ],
    ids=str,
)
def test_where_it_is_not_promised(changes: dict[str, Any]) -> None:
    from hpcrl.config import TrainerConfig
    from hpcrl.config.validate import build
    from tests.trainer.scenarios import laid_over

    section = {"policy": {"model": {"path": "model"}}, "deterministic": True}
    for promised in ({}, {"policy": {"model": {"lora": {"rank": 4}}}}):
        assert has_bits_of_engine(build(TrainerConfig, laid_over(section, promised)))
    assert not has_bits_of_engine(build(TrainerConfig, laid_over(section, changes)))
