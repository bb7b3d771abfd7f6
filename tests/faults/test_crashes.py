"""Processes and nodes that die, and errors that come back (scenarios 21, 22 and 25)."""

from __future__ import annotations

from signal import SIGKILL, SIGTERM

import pytest

from hpcrl.rundir.ledger import read_attempts, read_outcomes
from tests.faults.history import assert_nothing_lost
from tests.faults.scenario import START_S, Scenario, fault
from tests.processes import send

ENDS_S = 20.0  # 10 s are promised; three other scenarios share the two cores

VICTIMS = {
    "rank": lambda scenario, run: [scenario.rank(run)],
    "torchrun": lambda scenario, run: [scenario.torchrun(run)],
    "agent": lambda scenario, run: [scenario.agent(run, 0)],
    "controller": lambda scenario, run: [scenario.controller(run)],
    "srun": lambda scenario, run: scenario.sruns(run),
}
RANKS = {"torchrun": 2}  # one rank alone has none


@pytest.mark.faults_slow
@pytest.mark.parametrize("victim", VICTIMS)
def test_21_killed(scenario: Scenario, victim: str) -> None:
    """SIGKILL of one process: the attempt ends within seconds, says why, and the next one goes on from the last commit."""
    ranks = {"trainer.placement.policy_num_gpus_per_node": RANKS.get(victim, 1)}
    run = scenario.submit({"trainer.ckpt_interval": 2, **ranks})
    scenario.reach(run, 4)
    send(VICTIMS[victim](scenario, run), SIGKILL)
    outcome = scenario.outcome(run, 1, ENDS_S)
    assert outcome.kind == "failed"
    if victim in ("rank", "controller"):
        assert "SIGKILL" in outcome.message
    scenario.outcome(run, 2)
    assert_nothing_lost(scenario, run, same_values=victim not in RANKS)
    assert len(read_attempts(run)) == 2


@pytest.mark.faults_slow
def test_21_killed_first_agent_before_the_controller_serves(scenario: Scenario) -> None:
    """The other nodes notice it, though they have never heard of a controller."""
    run = scenario.submit()
    scenario.wait(lambda: scenario.processes(run, "/jobs/train.py"), "the trainer starts", START_S, run)
    send([scenario.agent(run, 0)], SIGKILL)
    assert scenario.outcome(run, 1, 120).kind == "failed"
    assert_nothing_lost(scenario, run)
    assert len(read_attempts(run)) == 2


@pytest.mark.faults_slow
def test_21_killed_batch_shell(scenario: Scenario) -> None:
    """With the batch shell goes who requeues the job: the first agent does, and saves beside that."""
    run = scenario.submit({"trainer.ckpt_interval": 2})
    scenario.reach(run, 4)
    send([scenario.batch_shell(run)], SIGKILL)
    assert scenario.outcome(run, 1, ENDS_S).kind == "interrupted"
    assert_nothing_lost(scenario, run)
    assert "the batch script was killed" in run.log(1, "agent-0").read_text()
    assert len({attempt.job_id for attempt in read_attempts(run)}) == 1, "nobody has resumed it"
    assert len(read_attempts(run)) == 2


@pytest.mark.faults_slow
def test_21_killed_batch_shell_that_slurm_does_not_miss_yet(scenario: Scenario) -> None:
    """The attempt fails, and its agents end, while slurmctld cannot hear that the shell was killed: the first agent waits until it has."""
    run = scenario.submit({"trainer.ckpt_interval": 2})
    scenario.reach(run, 4)
    (first, *_) = read_attempts(run)[0].hosts
    scenario.cut(first)
    send([scenario.batch_shell(run), scenario.controller(run)], SIGKILL)
    assert scenario.outcome(run, 1, ENDS_S).kind == "failed"
    scenario.pause(5)  # until the agents would have ended
    scenario.join(first)
    assert_nothing_lost(scenario, run)
    assert len({attempt.job_id for attempt in read_attempts(run)}) == 1, "nobody has resumed it"
    assert len(read_attempts(run)) == 2


@pytest.mark.faults_slow
def test_21_killed_at_its_end(scenario: Scenario) -> None:
    """What requeues the job is killed when it wants to, twice: the batch shell begins it again."""
    folder, tries = scenario.path / "bin", scenario.path / "tries"
    folder.mkdir()
    kills = f'if [ "$1" = requeue ]; then echo >> {tries}; [ $(wc -l < {tries}) -gt 2 ] || {{ kill -KILL $PPID; exit; }}; fi'
    (folder / "scontrol").write_text(f'#!/bin/sh\n{kills}\nexec /usr/bin/scontrol "$@"\n')
    (folder / "scontrol").chmod(0o755)
    run = scenario.submit(setup=[f'export PATH="{folder}:$PATH"'])
    scenario.reach(run, 3)
    send(scenario.agents(run), SIGTERM)
    assert scenario.outcome(run, 1, ENDS_S).kind == "interrupted"
    assert_nothing_lost(scenario, run)
    assert len(tries.read_text().splitlines()) == 3
    assert len({attempt.job_id for attempt in read_attempts(run)}) == 1, "nobody has resumed it"


@pytest.mark.nodes(3)
@pytest.mark.faults_slow
def test_22_node_of_the_trainer_goes_down(scenario: Scenario) -> None:
    """A node is switched off with all that runs on it: Slurm notices, requeues the job, and it goes on elsewhere from its last commit."""
    run = scenario.submit({"trainer.ckpt_interval": 2, "trainer.max_steps": 12}, pinned=False)
    scenario.reach(run, 4)
    scenario.knobs(latency_s=600)
    (lost, *_) = read_attempts(run)[0].hosts
    scenario.cluster.stop(lost)
    try:
        scenario.wait(lambda: len(read_attempts(run)) == 2, "the second attempt", 150, run)
        scenario.knobs()
        assert_nothing_lost(scenario, run)
    finally:
        scenario.cluster.start(lost)
    assert lost not in read_attempts(run)[-1].hosts


@pytest.mark.faults_slow
def test_25_the_same_crash_again_and_again(scenario: Scenario) -> None:
    """Without a new commit between them, three crashes hold the run, with the error; put right, it goes on."""
    run = scenario.submit(
        {"trainer.ckpt_interval": 100},
        setup=[f'[ -e "{scenario.path}/repaired" ] || {fault("weights.begin@5:raise=EIO")}'],
    )
    scenario.wait(lambda: len(read_outcomes(run)) == 3, "three crashes", 240, run)
    scenario.wait(lambda: not scenario.queued(run) or "Held" in scenario.queued(run), "no fourth", 60, run)
    assert len(read_attempts(run)) == 3
    said = scenario.told("status", "run")
    assert "held" in said, said
    assert "Input/output error" in said, "the error is shown"
    (scenario.path / "repaired").touch()
    scenario.told("resume", "run")
    assert_nothing_lost(scenario, run)


@pytest.mark.faults_slow
def test_25_crashes_with_progress_between_them(scenario: Scenario) -> None:
    """Each attempt commits once and dies at its second commit: as often as it takes."""
    run = scenario.submit(setup=[fault("checkpoints.begin@2:kill")])
    scenario.wait(lambda: scenario.outcome(run, 4, 300), "the fourth attempt", 300, run)
    assert_nothing_lost(scenario, run)
    assert [outcome.kind for outcome in read_outcomes(run)] == ["failed", "failed", "failed", "done"]


@pytest.mark.nodes(3)
@pytest.mark.faults_slow
def test_25_a_node_that_crashes_twice_is_left_out(scenario: Scenario) -> None:
    """The nodes that the user excludes stay so."""
    run = scenario.submit({"trainer.ckpt_interval": 2, "trainer.max_steps": 24}, pinned=False)
    for attempt, step in ((1, 4), (2, 10)):
        scenario.reach(run, step)
        send([scenario.rank(run)], SIGKILL)
        scenario.outcome(run, attempt, ENDS_S)
    assert_nothing_lost(scenario, run, steps=24, same_values=False)
    first, second, third = (attempt.hosts for attempt in read_attempts(run))
    assert first[0] == second[0]
    assert first[0] not in third
    assert set(third) < set(scenario.nodes)
