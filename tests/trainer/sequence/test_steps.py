"""Ranks that share the tokens of each sample: optimizer steps are those of plain transformers, one sample at a time."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer import test_critic
from tests.trainer.backends.test_engine import FROZEN, GROUPS, SIZE, expect_same, true, variant
from tests.trainer.backends.test_lora import ONLY_ADAPTERS, PLAIN, adapt
from tests.trainer.launcher import run_ranks
from tests.trainer.material import run_of_two
from tests.trainer.ranks import Ranks

TOKENS = 40


def together(size: int, micro: int = 2, policy: dict[str, Any] | None = None, **trainer: Any) -> dict[str, Any]:
    return variant(micro, policy={"sequence_parallel_size": size, **(policy or {})}, **trainer)


VARIANTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "plain": together(2),
        "recomputed": together(2, logprobs_chunk_size=5, gradient_checkpointing=True),
        "shared prefixes": {**together(2), "tokens": TOKENS, "shared": True},
        "adapters": together(2, policy={"model": {"lora": PLAIN}}, gradient_checkpointing=True),
    },
    4: {
        "of two": {**together(2), "tokens": 25},
        "of four": together(4, gradient_checkpointing=True, gradient_checkpointing_use_reentrant=True),
        "copies of two": together(4, policy={"fsdp_config": {"fsdp_size": 2}}),
        "frozen": together(4, policy={"freeze_pattern": [FROZEN]}),
        "prefixes of four": {**together(4), "tokens": TOKENS, "shared": True},
    },
}
CRITICS = {
    2: {"values": {"micro": 1, "trainer": {"policy": {"sequence_parallel_size": 2}}, "tokens": TOKENS, "shared": True}},
    4: {"values of four": {"micro": 2, "trainer": {"critic": {"sequence_parallel_size": 4}}}},
}


def options(path: Path, model_path: Path, ranks: int) -> list[tuple[str, dict[str, Any]]]:
    run = run_of_two(path / "run", GROUPS, SIZE, alike=5)
    told = {"model": str(model_path), "run": str(run.path), "out": str(path)}
    return [("variants", {**told, "variants": VARIANTS[ranks]}), ("one_batch", {**told, "variants": CRITICS[ranks]})]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, model_path: Path, two: Ranks) -> Path:
    path = tmp_path_factory.mktemp("sequence")
    two.play([(f"sequence.scenarios:{name}", told) for name, told in options(path, model_path, 2)])
    return path


@pytest.mark.parametrize("name", ["plain", "recomputed", "shared prefixes"])
def test_optimizer_steps_are_those_of_one_rank(results: Path, model_path: Path, name: str) -> None:
    expect_same(results, true(results, model_path), name)


def test_adapters(results: Path, model_path: Path) -> None:
    expect_same(results, true(results, model_path, frozen=ONLY_ADAPTERS, adapt=partial(adapt, "all")), "adapters")


def test_values_and_steps_of_a_critic(results: Path, model_path: Path) -> None:
    truth = test_critic.true(results, model_path, "values")
    for key, values in test_critic.of_samples(results, "values", "values").items():
        torch.testing.assert_close(values, truth.old[key], atol=1e-5, rtol=0)
    test_critic.expect_same_step(results, truth, "values")


@pytest.mark.faults_slow
def test_four_ranks(tmp_path: Path, model_path: Path) -> None:
    done = run_ranks(4, json.dumps(options(tmp_path, model_path, 4)), script="trainer/sequence/scenarios.py")
    assert done.returncode == 0, done.stderr
    truth = true(tmp_path, model_path)
    for name in VARIANTS[4]:
        expect_same(tmp_path, true(tmp_path, model_path, frozen=FROZEN) if name == "frozen" else truth, name)
    tensors = load_file(tmp_path / "values of four.safetensors")
    for number, gradients in enumerate(test_critic.true(tmp_path, model_path, "values of four").gradients):
        for key, value in gradients.items():
            torch.testing.assert_close(tensors[f"gradient.{number}.{key}"], value, atol=1e-5, rtol=1e-4)


@pytest.mark.faults_slow
def test_compiled_layers_end_where_ranks_exchange_heads(results: Path, model_path: Path, two: Ranks) -> None:
    run, told = str(results / "run"), {"model": str(model_path), "out": str(results)}
    ways = {"compiled": together(2, policy={"compile_model": True})}
    two.play([("sequence.scenarios:variants", {**told, "run": run, "variants": ways})])
    expect_same(results, true(results, model_path), "compiled")
