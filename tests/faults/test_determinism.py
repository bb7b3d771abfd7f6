"""One set of bits (scenario 56): with trainer.deterministic a run that is interrupted twenty times ends as one that nothing happens to."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from hpcrl.launch.manage.certificate import certificate_of, first_difference
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import read_attempts
from tests.faults.history import assert_ended, assert_groups_once, last_trained
from tests.faults.scenario import BATCH, START_S, Scenario
from tests.jobs.small_run import curve
from tests.paths import CONFIGS
from tests.processes import send

INTERRUPTIONS, STEPS = 20, 300
WORKER_EVERY, RANK_AT = 4, 10  # of the interruptions, those before which a process is killed
SAMPLED = {
    "trainer.deterministic": True,
    "trainer.max_steps": STEPS,
    "trainer.epochs": 8,
    "trainer.ckpt_interval": 20,
    "generator.inference_engine.backend": "transformers",
    "generator.on_logprob_mismatch": "stop",
}
ROWS = [
    *("trainer.deterministic=true", f"trainer.max_steps={STEPS}", "trainer.epochs=200", "trainer.ckpt_interval=20"),
    *("trainer.train_batch_size=256", "trainer.policy_mini_batch_size=128", "trainer.max_tokens_per_micro_batch=1024"),
    *("trainer.project_name=faults", "trainer.eval_interval=50", "slurm.partition=main", "slurm.time_minutes=10"),
    *("slurm.cpus_per_task=1", "slurm.exclusive=true"),
]


def of_samples(scenario: Scenario, name: str, settings: dict[str, Any]) -> Run:
    return scenario.submit({**SAMPLED, **settings}, name=name, stand_in=False)


def of_rows(scenario: Scenario, name: str) -> Run:
    places = [f"slurm.extra.nodelist={','.join(scenario.nodes)}", f"slurm.root={scenario.path / 'runs'}"]
    named = [f"trainer.run_name={name}", "trainer.placement.policy_num_nodes=2"]
    done = scenario.hpcrl("submit", str(CONFIGS / "sft_tiny.toml"), *ROWS, *places, *named)
    assert done.returncode == 0, done.stdout + done.stderr
    return scenario.run_of(name)


def interrupted(scenario: Scenario, run: Run, *, samples: bool) -> None:
    """Take the nodes of a run again and again, each time soon after it has trained further; kill a worker or a rank before that now and then."""
    for number in range(1, INTERRUPTIONS + 1):
        scenario.wait(lambda number=number: len(read_attempts(run)) >= number, f"attempt {number}", START_S, run)
        before = last_trained(run)
        scenario.wait(lambda before=before: last_trained(run) >= before + 2, f"a step after {before}", START_S, run)
        if number == RANK_AT:
            send([scenario.rank(run)], signal.SIGKILL)
            scenario.outcome(run, number)
            continue
        if samples and number % WORKER_EVERY == 0:
            send([scenario.worker(run)], signal.SIGKILL)
        scenario.preempt()
        assert scenario.outcome(run, number).kind == "interrupted", scenario.report(run)


@pytest.mark.faults_slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="one_rank"),
        pytest.param({"trainer.placement.policy_num_nodes": 2}, id="two_ranks", marks=pytest.mark.nodes(3)),
        pytest.param({"trainer.policy.model.lora.rank": 8}, id="adapters"),
        pytest.param(None, id="rows_two_ranks"),
    ],
)
def test_56_the_same_bits_after_twenty_interruptions(scenario: Scenario, settings: dict[str, Any] | None) -> None:
    runs = list[Run]()
    for name in ("run", "whole"):
        run = of_rows(scenario, name) if settings is None else of_samples(scenario, name, settings)
        if name == "run":
            interrupted(scenario, run, samples=settings is not None)
        assert_ended(scenario, run)
        runs.append(run)
    assert len(read_attempts(runs[0])) > INTERRUPTIONS
    if settings is not None:
        assert_groups_once(runs[0], STEPS * BATCH)
        assert set(curve(runs[0], "policy/logprob_mismatch").values()) == {0.0}, "trainer and engine have other bits"
    one, other = map(certificate_of, runs)
    assert first_difference(one, other) is None, scenario.told(
        "certify", str(runs[0].path), "--against", str(runs[1].path)
    )
    last = f"s{STEPS:06d}"
    assert len(one["steps"]) == STEPS
    assert one["checkpoints"][last] == other["checkpoints"][last]
