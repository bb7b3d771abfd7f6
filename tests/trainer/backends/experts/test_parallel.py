"""Experts that ranks share, on FSDP2: what tests/trainer/backends/experts/test_balance.py leaves open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hpcrl.config import FSDPConfig
from hpcrl.errors import DataError
from hpcrl.planning.memory import fsdp_state
from hpcrl.planning.shapes import shapes
from hpcrl.rundir.layout import Run
from hpcrl.trainer.distributed import World
from hpcrl.trainer.models.experts.parallel import expert_layers
from hpcrl.trainer.models.hf import ModelSource
from hpcrl.types import Batch
from tests.trainer import scenarios
from tests.trainer.backends.experts.test_balance import EPS, EXPERTS, SHARED, Balanced, mixture
from tests.trainer.backends.experts.test_replay import FAMILIES, SIZES, made
from tests.trainer.backends.test_engine import GROUPS, SIZE, expect_same, variant
from tests.trainer.launcher import run_ranks
from tests.trainer.material import load_weights, make_batch, run_of_two
from tests.trainer.ranks import Ranks

__all__ = ["mixture"]
POLICY = {"optimizer_config": {"eps": EPS}}
TO_FOUR = {"fsdp_config": {"expert_parallel_size": 4}}
FOUR: dict[str, dict[str, Any]] = {
    "two-of-four": variant(1, gradient_checkpointing=True, policy={**EXPERTS, **SHARED}, ref=SHARED),
    "all-four": {**variant(1, policy={**EXPERTS, **TO_FOUR}, ref=TO_FOUR), "turns": True},
    "copies-of-two": variant(
        1,
        gradient_checkpointing=True,
        gradient_checkpointing_use_reentrant=True,
        policy={**EXPERTS, "fsdp_config": {"fsdp_size": 2, **SHARED["fsdp_config"]}},
    ),
    "with-tokens": variant(2, policy={**EXPERTS, **TO_FOUR, "sequence_parallel_size": 2}),
    "compiled": variant(2, policy={**EXPERTS, **SHARED, "compile_model": True}),
    "kept": variant(
        1,
        gradient_checkpointing=True,
        gradient_checkpointing_keep="attention",
        policy={**EXPERTS, "fsdp_config": {"reshard_after_forward": 2, **SHARED["fsdp_config"]}},
    ),
}
BF16 = variant(
    1, policy={**EXPERTS, "fsdp_config": {**SHARED["fsdp_config"], "mixed_precision": {"param_dtype": "bf16"}}}
)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, mixture: Path, two: Ranks) -> Path:
    path = tmp_path_factory.mktemp("parallel")
    run = run_of_two(path / "run", GROUPS, SIZE)
    make_batch(run, 3, GROUPS, SIZE)
    options = {"model": str(mixture), "run": str(run.path), "out": str(path), "policy": POLICY}
    two.play([("backends.experts.scenarios:lives", options)])
    return path


def test_each_rank_has_its_part_of_the_experts(told: Path, mixture: Path) -> None:
    found = json.loads((told / "lives.json").read_text())
    assert found["shapes"] == [[2, 48, 32], [2, 32, 24]]
    sizes = shapes(ModelSource(str(mixture), role="trainer.policy"), FSDPConfig(expert_parallel_size=2), None)
    assert {weight.spread for weight in sizes.weights} == {1, 2}
    assert fsdp_state(sizes.weights, 2, "fp32").weights == found["bytes"]


def test_runs_go_on_with_and_without_shared_experts(told: Path, mixture: Path, alone: World) -> None:
    found = json.loads((told / "lives.json").read_text())
    names = load_weights(told / "trained1" / "weights" / "v000001")
    assert "model.layers.0.mlp.experts.3.down_proj.weight" in names, "those of the hub, of whole experts"
    for step in (1, 2):
        assert found[f"restored {step}"] == found[f"trained {step}"]
    engine = scenarios.make_engine(alone, str(mixture), {"trainer": {"policy": POLICY}})
    scenarios.train_steps(engine, Run.open(told / "run"), range(1, 4), {"micro": 2})
    for name, value in load_file(told / "lives.safetensors").items():
        torch.testing.assert_close(value, scenarios.parameters(engine)[name], atol=1e-5, rtol=0)
    engine.restore(told / "s3")
    for name, value in scenarios.parameters(engine).items():
        assert torch.equal(value, load_file(told / "lives.safetensors")[name])


def test_every_kind_of_experts_is_computed_as_by_one_rank(two: Ranks) -> None:
    families = {name: SIZES | FAMILIES[name] for name in ("qwen3_moe", "mixtral", "gpt_oss")}
    two.play([("backends.experts.scenarios:layers", {"families": families})])


def test_what_ranks_cannot_share_is_refused() -> None:
    with pytest.raises(DataError, match="Qwen3MoeForCausalLM equally; use a divisor"):
        expert_layers(made("qwen3_moe"), 3)
    with pytest.raises(
        DataError, match="with 2, 5 ranks shard the 48 rows of each expert of Qwen3MoeForCausalLM, which they cannot"
    ):
        expert_layers(made("qwen3_moe"), 2, 5)
    with torch.device("meta"), pytest.raises(DataError, match="expert_parallel_size: Linear has no experts"):
        expert_layers(torch.nn.Linear(2, 2), 2)


@pytest.mark.faults_slow
def test_muon_moves_experts_that_ranks_share(tmp_path: Path, mixture: Path, two: Ranks, alone: World) -> None:
    """And goes on with whole ones, from whose momentum they are divided again."""
    run = run_of_two(tmp_path / "run", GROUPS, SIZE)
    make_batch(run, 3, GROUPS, SIZE)
    policy = {"optimizer_config": {"name": "Muon"}}
    options = {"model": str(mixture), "run": str(run.path), "out": str(tmp_path), "policy": policy}
    two.play([("backends.experts.scenarios:lives", options)])
    engine = scenarios.make_engine(alone, str(mixture), {"trainer": {"policy": policy}})
    begun = scenarios.parameters(engine)
    scenarios.train_steps(engine, run, range(1, 4), {"micro": 2})
    trained = scenarios.parameters(engine)
    for name, value in load_file(tmp_path / "lives.safetensors").items():
        if "experts" in name:
            moved = (trained[name] - begun[name]).norm()
            assert (value - trained[name]).norm() < 0.02 * moved, name


@pytest.mark.faults_slow
def test_four_ranks(tmp_path: Path, mixture: Path) -> None:
    run = run_of_two(tmp_path / "run", GROUPS, SIZE)
    options = {"model": str(mixture), "run": str(run.path), "out": str(tmp_path), "variants": {**FOUR, "bf16": BF16}}
    done = run_ranks(4, json.dumps([("variants", options)]))
    assert done.returncode == 0, done.stderr
    truth = Balanced(mixture, run, [Batch.from_json(json.loads(run.batch(step).read_text())) for step in (1, 2)])
    for name in FOUR:
        expect_same(tmp_path, truth, name)
    losses = [update["final_loss"] for update in json.loads((tmp_path / "bf16.json").read_text())]
    assert losses == pytest.approx(truth.losses, abs=0.05)
