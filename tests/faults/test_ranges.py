"""Ranges of nodes: a run that gets another number of nodes in each attempt trains what a run of fixed size trains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import read_attempts
from tests.faults.history import CURVES, assert_ended, assert_groups_once, assert_reported_once, last_trained
from tests.faults.scenario import Scenario
from tests.faults.test_preemption import trained_rows
from tests.jobs.small_run import curve
from tests.paths import CONFIGS

NODES = "trainer.placement.policy_num_nodes"
STEPS, GROUPS = 12, 6
PATIENCE_S = 900.0  # attempts follow each other, beside three other scenarios on two cores
MEGATRON: dict[str, Any] = {
    "trainer.strategy": "megatron",
    "trainer.policy.fsdp_config": {},
    "trainer.policy.megatron_config": {"dtype": "fp32"},
    "trainer.ref.megatron_config": {"dtype": "fp32"},
}
BACKENDS = pytest.mark.parametrize("settings", [{}, MEGATRON], ids=["fsdp2", "megatron"])


@pytest.mark.nodes(4)
@pytest.mark.faults_slow
@BACKENDS
def test_groups_are_trained_once_with_the_losses_of_a_fixed_run(scenario: Scenario, settings: dict[str, Any]) -> None:
    """In six attempts on 3, 1, 2, 3, 1 and 2 nodes, beside one that generates."""
    given = {
        "trainer.train_batch_size": GROUPS,
        "trainer.policy_mini_batch_size": GROUPS // 2,
        "trainer.max_steps": 2 * STEPS,
        "trainer.policy.optimizer_config.lr": 1e-4,  # rounding, which other ranks do in another order, grows with it
        "slurm.time_minutes": 60,
    }
    run = scenario.submit({**settings, **given, NODES: "1-3"}, pinned=False)
    give_other_nodes(scenario, run, [(3, 3), (1, 1), (2, 2), (3, 3), (1, 1), (2, 2)], others=1)
    whole = scenario.submit({**settings, **given, NODES: 2}, name="whole", pinned=False)
    wait_for_end(scenario, whole)
    assert_same(run, whole, CURVES)
    assert_groups_once(run, 2 * STEPS * GROUPS)


@pytest.mark.nodes(4)
@pytest.mark.faults_slow
@BACKENDS
def test_rows_are_trained_once_with_the_losses_of_a_fixed_run(scenario: Scenario, settings: dict[str, Any]) -> None:
    """In six attempts on 4, 2 and 1 nodes, on 2 of 3, which cannot share the batches, and on 4 and 2 again."""
    other = ["trainer.strategy=megatron", "trainer.policy.fsdp_config=default"]
    backend = [*other, "trainer.policy.megatron_config.dtype=fp32"] if settings else []

    def submit(name: str, nodes: str) -> Run:
        given = [f"trainer.run_name={name}", f"{NODES}={nodes}", f"slurm.root={scenario.path / 'runs'}"]
        given += [f"slurm.extra.exclude={','.join(scenario.others)}", "slurm.partition=main", "slurm.exclusive=true"]
        given += ["slurm.time_minutes=60", "slurm.time_min_minutes=30", "slurm.cpus_per_task=1"]
        given += ["trainer.project_name=faults", "trainer.train_batch_size=1024", "trainer.policy_mini_batch_size=512"]
        given += [
            "trainer.epochs=10",
            f"trainer.max_steps={4 * STEPS}",
            "trainer.policy.optimizer_config.lr=2e-5",
            "trainer.eval_interval=4",
            "trainer.max_tokens_per_micro_batch=1024",
        ]
        done = scenario.hpcrl("submit", str(CONFIGS / "sft_tiny.toml"), *given, *backend)
        assert done.returncode == 0, done.stdout + done.stderr
        return scenario.run_of(name)

    run = submit("run", "1-4")
    give_other_nodes(scenario, run, [(4, 4), (2, 2), (1, 1), (3, 2), (4, 4), (2, 2)], others=0)
    whole = submit("whole", "2")
    wait_for_end(scenario, whole)
    assert trained_rows(run) == trained_rows(whole)
    assert_same(run, whole, ["policy/final_loss", "policy/grad_norm", "eval/all/loss"])


def give_other_nodes(scenario: Scenario, run: Run, sizes: Sequence[tuple[int, int]], others: int) -> None:
    """Let a run have other nodes in each attempt, and wait for its end.

    Args:
        sizes: of each attempt the nodes that it may train on, and how many of them it takes.
        others: nodes of the run that do not train.
    """
    reach(scenario, run, 2)
    attempts = 1
    for offered, taken in sizes[1:]:
        with drained(scenario, scenario.nodes[offered + others :]):
            before = last_trained(run)
            assert scenario.hpcrl("requeue", run.name).returncode == 0
            attempts += 1
            scenario.wait(lambda n=attempts: len(read_attempts(run)) == n, f"attempt {attempts}", PATIENCE_S, run)
            reach(scenario, run, before + 2)
            shown = f"{taken + others} node(s): policy_num_nodes {taken}"
            shown += f"; given back: {scenario.nodes[taken + others]}" if offered > taken else ""
            assert shown in scenario.told("status", run.name)
    wait_for_end(scenario, run)
    assert_reported_once(run)
    found = [(one.nodes_at_start - others, one.sizes) for one in read_attempts(run)]
    assert found == [(offered, {NODES: taken}) for offered, taken in sizes], scenario.report(run)


def reach(scenario: Scenario, run: Run, step: int) -> None:
    scenario.wait(run.batch(step).exists, f"the batch of step {step}", PATIENCE_S, run)


def wait_for_end(scenario: Scenario, run: Run) -> None:
    scenario.wait(lambda: not scenario.queued(run), f"{run.name} ends", PATIENCE_S, run)
    assert_ended(scenario, run)


@contextmanager
def drained(scenario: Scenario, nodes: Sequence[str]) -> Iterator[None]:
    """Let no job start on these nodes; there may be none."""
    if not nodes:
        yield
        return
    scenario.slurm("scontrol", "update", f"NodeName={','.join(nodes)}", "State=DRAIN", "Reason=test")
    try:
        yield
    finally:
        scenario.slurm("scontrol", "update", f"NodeName={','.join(nodes)}", "State=RESUME")


def assert_same(run: Run, whole: Run, names: Sequence[str]) -> None:
    assert len(read_attempts(whole)) == 1
    for name in names:
        found, expected = curve(run, name), curve(whole, name)
        assert len(expected) > 1, name
        near = 1e-4 if name == "policy/grad_norm" else 1e-6  # a sum over ranks is rounded in another order
        assert found == pytest.approx(expected, rel=near, abs=near), name
