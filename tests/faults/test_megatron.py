"""Megatron-core over two nodes: it starts as FSDP2 on one rank does, and an interruption changes nothing of what it trains.

Two backends add in another order, and what that changes grows with every step, on each processor otherwise: they are compared in the first step
alone. What an interruption may not change is compared within one backend and one layout, where nothing differs but the interruption.
"""

from __future__ import annotations

import json
from signal import SIGKILL
from typing import Any

import pytest
import torch

from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import read_attempts
from tests.faults.history import assert_nothing_lost, last_saved, last_trained
from tests.faults.scenario import STEPS, Scenario
from tests.jobs.small_run import curve
from tests.processes import send
from tests.trainer.material import load_weights

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


def assert_starts_as_fsdp2(scenario: Scenario, run: Run) -> None:
    """Assert that the first step, of two optimizer steps, is that of FSDP2, and that all steps have the same samples."""
    for name, expected in scenario.uninterrupted().items():
        found = curve(run, name)
        assert found[1] == pytest.approx(expected[1], rel=1e-4, abs=1e-6), f"{name} differs"
        if name.startswith("reward/"):
            assert found == pytest.approx(expected, rel=1e-6), f"{name} differs"


def values_of_attempt(run: Run, attempt: int) -> dict[int, dict[str, float]]:
    """Return by step what an attempt's trainer reported, also where a later attempt trained the step again."""
    lines = map(json.loads, run.metrics_of("trainer").read_text().splitlines())
    steps: dict[int, dict[str, float]] = {}
    for line in lines:
        if line["attempt"] == attempt and "step" in line:
            steps.setdefault(line["step"], {}).update(line["metrics"])
    return steps


@pytest.mark.faults_slow
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_is_killed(scenario: Scenario, rank: int) -> None:
    """Tensor parallel over two nodes: one rank dies after the commit of step 4, both train the steps after it again, and to the same values."""
    run = scenario.submit({**TWO_NODES, "trainer.ckpt_interval": 4, "trainer.hf_save_interval": STEPS})
    scenario.reach(run, 5)
    scenario.knobs(latency_s=600)  # before the next commit there are no samples to train
    scenario.wait(lambda: last_trained(run) >= 5, "step 5", run=run)
    send([scenario.rank(run, rank)], SIGKILL)
    outcome = scenario.outcome(run, 1, 30)
    scenario.knobs()
    assert outcome.kind == "failed"
    assert "SIGKILL" in outcome.message
    scenario.outcome(run, 2)
    assert_nothing_lost(scenario, run, same_values=False)
    assert_starts_as_fsdp2(scenario, run)
    first, second = values_of_attempt(run, 1), values_of_attempt(run, 2)
    again = sorted(first.keys() & second.keys())
    assert (again[0], min(second)) == (5, 5), "training goes on from the commit of step 4"
    for step in again:
        for name in ("policy/policy_loss", "policy/grad_norm", "policy/policy_lr"):
            assert second[step][name] == pytest.approx(first[step][name], rel=1e-6, abs=1e-9), f"{name} of step {step}"
    assert [len(attempt.hosts) for attempt in read_attempts(run)] == [3, 3]
    exported = scenario.path / "exported"
    assert str(exported) in scenario.told("checkpoint", "export", "run", "-o", str(exported))
    by_run, by_hand = (load_weights(path) for path in (run.export(STEPS), exported))
    assert by_run.keys() == by_hand.keys()
    assert all(torch.equal(by_run[name], by_hand[name]) for name in by_run)


@pytest.mark.faults_slow
def test_resumed_with_other_sizes(scenario: Scenario) -> None:
    """From two tensor parallel ranks to a single one, and from that to two pipeline stages."""
    scenario.knobs(latency_s=0.5)
    run = scenario.submit(TWO_NODES, pinned=False)
    scenario.reach(run, 4)
    assert "run: cancelled" in scenario.told("cancel", "run")
    first = last_saved(run)
    resumed = scenario.told("resume", "run", *sizes(1, tensor=1))
    assert (
        f"warning: trainer.policy.megatron_config.{TENSOR}: 2 -> 1 (the state is spread over other processes" in resumed
    )
    scenario.reach(run, first[0] + 4)
    assert "run: cancelled" in scenario.told("cancel", "run")
    second = last_saved(run)
    assert second > first
    scenario.told("resume", "run", *sizes(2, pipeline=2))
    scenario.outcome(run, 3)
    assert_nothing_lost(scenario, run, same_values=False)
    assert_starts_as_fsdp2(scenario, run)
    assert [len(attempt.hosts) for attempt in read_attempts(run)] == [3, 2, 3]
    (*_, again) = json.loads(scenario.hpcrl("replay", "run", "--step", str(STEPS), "--json").stdout)
    norm = curve(run, "policy/grad_norm")[STEPS]
    assert again["metrics"]["policy/grad_norm"] == pytest.approx(norm, rel=1e-5), "both stages, on one machine"
