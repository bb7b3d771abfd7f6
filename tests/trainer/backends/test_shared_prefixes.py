"""Prefixes computed once, in the engines: optimizer steps of policy, adapters and critic are those of plain transformers, one sample at a time."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcrl.rundir.layout import Run
from hpcrl.trainer.batching import MicroBatchLimit
from hpcrl.trainer.distributed import World
from hpcrl.trainer.metrics import describe_mini_batches
from hpcrl.types import Batch
from tests.trainer import critic_scenarios, scenarios, test_critic
from tests.trainer.backends.test_engine import GROUPS, SIZE, expect_same, true, variant
from tests.trainer.backends.test_lora import ONLY_ADAPTERS, PLAIN, adapt, with_lora
from tests.trainer.material import load, run_of_two
from tests.trainer.ranks import Ranks

TOKENS = 40
SHARED = {"tokens": TOKENS, "shared": True}
VARIANTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "alone": {**variant(1), **SHARED},
        "recomputed": {**variant(1, logprobs_chunk_size=5, gradient_checkpointing=True), **SHARED},
        "without flash": {**variant(1, flash_attn=False), **SHARED},
        "adapters": {**with_lora(PLAIN), **SHARED},
    },
    2: {
        "two ranks": {**variant(1), **SHARED},
        "reentrant": {
            **variant(1, gradient_checkpointing=True, gradient_checkpointing_use_reentrant=True),
            "tokens": 25,
            "shared": True,
        },
        "adapters of two ranks": {**with_lora(PLAIN, gradient_checkpointing=True), **SHARED},
    },
}
CRITICS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"values": {"micro": 1, **SHARED}},
    2: {"values of two ranks": {"micro": 1, "trainer": {"gradient_checkpointing": True}, **SHARED}},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, model_path: Path, alone: World, two: Ranks) -> Path:
    path = tmp_path_factory.mktemp("shared")
    options = {
        "model": str(model_path),
        "run": str(run_of_two(path / "run", GROUPS, SIZE, alike=5).path),
        "out": str(path),
    }
    policies, critics = (
        {ranks: {**options, "variants": found[ranks]} for ranks in (1, 2)} for found in (VARIANTS, CRITICS)
    )
    scenarios.variants(alone, policies[1])
    critic_scenarios.one_batch(alone, critics[1])
    two.play([("scenarios:variants", policies[2]), ("critic_scenarios:one_batch", critics[2])])
    return path


def test_prefixes_are_shared_at_all(results: Path, alone: World) -> None:
    run = Run.open(results / "run")
    batch = Batch.from_json(json.loads(run.batch(1).read_text()))
    whole, shared = (
        load(run, batch, scenarios.ALGORITHM, 2, MicroBatchLimit(1, TOKENS, flag), alone) for flag in (False, True)
    )
    for mini, other in zip(whole, shared, strict=True):
        assert other.plan.lengths != other.plan.computed
        assert sum(other.plan.computed) <= sum(mini.plan.computed) - 2 * 2 * 5, "two groups, of three samples each"
        batches = list(other.micro_batches())
        assert all(one.prefixes is not None for one in batches)
        computed = sum(len(one.prefixes.kept) for one in batches if one.prefixes)
        assert computed == sum(other.plan.computed), "metadata say what tokens say"
        assert not any(one.prefixes for one in mini.micro_batches())
    computed, tokens = (sum(sum(getattr(mini.plan, name)) for mini in shared) for name in ("computed", "lengths"))
    assert describe_mini_batches(shared)["throughput/shared_token_share"] == pytest.approx(1 - computed / tokens)
    assert "throughput/shared_token_share" not in describe_mini_batches(whole)


@pytest.mark.parametrize("name", ["alone", "recomputed", "without flash", "two ranks", "reentrant"])
def test_optimizer_steps_are_those_of_whole_samples(results: Path, model_path: Path, name: str) -> None:
    expect_same(results, true(results, model_path), name)


@pytest.mark.parametrize("name", ["adapters", "adapters of two ranks"])
def test_adapters(results: Path, model_path: Path, name: str) -> None:
    expect_same(results, true(results, model_path, frozen=ONLY_ADAPTERS, adapt=partial(adapt, "all")), name)


@pytest.mark.parametrize("name", ["values", "values of two ranks"])
def test_values_and_steps_of_a_critic(results: Path, model_path: Path, name: str) -> None:
    truth = test_critic.true(results, model_path, name)
    for key, values in test_critic.of_samples(results, name, "values").items():
        torch.testing.assert_close(values, truth.old[key], atol=1e-5, rtol=0)
    test_critic.expect_same_step(results, truth, name)
