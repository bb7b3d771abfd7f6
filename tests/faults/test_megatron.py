"""Megatron-core over two nodes: what it trains is what FSDP2 trains on one rank without any interruption, whatever happens in between."""

from __future__ import annotations

import json
from signal import SIGKILL
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hpcrl.run.layout import Run
from hpcrl.run.ledger import read_attempts
from tests.faults.history import assert_nothing_lost, last_saved
from tests.faults.processes import send
from tests.faults.stage import STEPS, Stage
from tests.jobs.story import curve

pytestmark = pytest.mark.nodes(3)

TENSOR = "tensor_model_parallel_size"
NODES = "trainer.placement.policy_num_nodes"
TWO_NODES: dict[str, Any] = {
    "trainer.strategy": "megatron",
    "trainer.policy.fsdp_config": {},
    "trainer.policy.megatron_config": {"dtype": "fp32", TENSOR: 2},
    "trainer.ref.megatron_config": {"dtype": "fp32", TENSOR: 2},
    NODES: 2,
}


def sizes(nodes: int, **of_each: int) -> list[str]:
    """Return settings for policy and reference on so many nodes."""
    of_models = [
        f"trainer.{role}.megatron_config.{name}_model_parallel_size={size}"
        for role in ("policy", "ref")
        for name, size in of_each.items()
    ]
    return [f"{NODES}={nodes}", *of_models]


def assert_as_fsdp2(stage: Stage, run: Run) -> None:
    """Assert that the curves are those of the uninterrupted run, which Megatron-core adds up in another order."""
    for name, expected in stage.uninterrupted().items():
        assert curve(run, name) == pytest.approx(expected, rel=1e-4, abs=1e-6), f"{name} differs"


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.faults_slow), 1])
def test_rank_is_killed(stage: Stage, rank: int) -> None:
    """Tensor parallel over two nodes: one rank dies, both go on from the last commit."""
    run = stage.submit({**TWO_NODES, "trainer.ckpt_interval": 2, "trainer.hf_save_interval": STEPS})
    stage.reach(run, 4)
    send([stage.rank(run, rank)], SIGKILL)
    outcome = stage.outcome(run, 1, 30)
    assert outcome.kind == "failed"
    assert "SIGKILL" in outcome.message
    stage.outcome(run, 2)
    assert_nothing_lost(stage, run, same_values=False)
    assert_as_fsdp2(stage, run)
    assert [len(attempt.hosts) for attempt in read_attempts(run)] == [3, 3]
    exported = stage.path / "exported"
    assert str(exported) in stage.told("checkpoint", "export", "run", "-o", str(exported))
    by_run, by_hand = (load_file(path / "model-00001.safetensors") for path in (run.export(STEPS), exported))
    assert by_run.keys() == by_hand.keys()
    assert all(torch.equal(by_run[name], by_hand[name]) for name in by_run)


@pytest.mark.faults_slow
def test_resumed_with_other_sizes(stage: Stage) -> None:
    """From two tensor parallel ranks to a single one, and from that to two pipeline stages."""
    stage.knobs(latency_s=0.5)
    run = stage.submit(TWO_NODES, pinned=False)
    stage.reach(run, 4)
    assert "run: cancelled" in stage.told("cancel", "run")
    first = last_saved(run)
    resumed = stage.told("resume", "run", *sizes(1, tensor=1))
    assert (
        f"warning: trainer.policy.megatron_config.{TENSOR}: 2 -> 1 (the state is spread over other processes" in resumed
    )
    stage.reach(run, first[0] + 4)
    assert "run: cancelled" in stage.told("cancel", "run")
    second = last_saved(run)
    assert second > first
    stage.told("resume", "run", *sizes(2, pipeline=2))
    stage.outcome(run, 3)
    assert_nothing_lost(stage, run, same_values=False)
    assert_as_fsdp2(stage, run)
    assert [len(attempt.hosts) for attempt in read_attempts(run)] == [3, 2, 3]
    (*_, again) = json.loads(stage.hpcrl("replay", "run", "--step", str(STEPS), "--json").stdout)
    norm = curve(run, "policy/grad_norm")[STEPS]
    assert again["metrics"]["policy/grad_norm"] == pytest.approx(norm, rel=1e-5), "both stages, on one machine"
