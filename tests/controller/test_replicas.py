"""When a run has too few replicas to go on, who of the workers is silent, and when environments fail too often."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hpcrl.controller.replicas import SILENCE_S, TICK_S, FailureWindow, MinReplicas, ReplicaHealth, WorkerRegistry
from hpcrl.errors import RunError, UserCodeError
from hpcrl.observe.metrics import merged
from hpcrl.rundir.layout import Run
from hpcrl.runtime.process_status import FAILED, GIVEN_UP, StatusWriter
from tests.controller.test_api import finish, make_run
from tests.controller.test_service import service
from tests.rows import group_meta

PATIENCE_S = 300.0


class Ticks:
    """A monotonic clock that a test moves."""

    def __init__(self) -> None:
        self.at = 1000.0

    def monotonic(self) -> float:
        return self.at


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> Ticks:
    ticks = Ticks()
    monkeypatch.setattr("hpcrl.runtime.heartbeat.time", ticks)
    return ticks


def pass_time(ticks: Ticks, seconds: float, tick: Callable[[], object]) -> object:
    """Call `tick` as the controller does; return the first answer that is not empty, or the last one."""
    for _ in range(int(seconds / TICK_S)):
        ticks.at += TICK_S
        if answer := tick():
            return answer
    return None


def health(tmp_path: Path, min_replicas: MinReplicas) -> ReplicaHealth:
    return ReplicaHealth(Run(tmp_path), 1, min_replicas)


def test_silence(ticks: Ticks) -> None:
    workers = WorkerRegistry()
    workers.seen("rollout-0", 0, "waiting")
    assert pass_time(ticks, SILENCE_S, workers.silent) is None
    workers.seen("rollout-1", 0, "waiting")
    assert pass_time(ticks, 1, workers.silent) == ["rollout-0"]
    assert workers.remove("rollout-0")
    ticks.at += 3600  # all of them were suspended
    assert workers.silent() == []
    assert workers.restarts == 0
    workers.seen("rollout-0", 0, "waiting")
    assert workers.restarts == 1


def test_nobody_calls_once_the_trainer_waits(tmp_path: Path, ticks: Ticks) -> None:
    watched = health(tmp_path, MinReplicas(patience_s=PATIENCE_S))
    assert pass_time(ticks, 2 * PATIENCE_S, lambda: watched.failure([], False)) is None
    assert pass_time(ticks, PATIENCE_S, lambda: watched.failure([], True)) is None
    error = pass_time(ticks, 2, lambda: watched.failure([], True))
    assert isinstance(error, RunError)
    assert str(error) == "no rollout worker has called for 300 s (slurm.replica_patience_minutes)"


def test_an_engine_that_starts_is_waited_for_while_its_lease_is_renewed(tmp_path: Path, ticks: Ticks) -> None:
    patience = PATIENCE_S / 5  # each tick writes a file
    watched = health(tmp_path, MinReplicas(patience_s=patience))
    process_status = StatusWriter(Run(tmp_path), "rollout-0", 1)

    def renewed() -> object:
        time.sleep(0.001)
        process_status.write("starting engine", at=ticks.at)  # else it is renewed only every few real seconds
        return watched.failure([], True)

    assert pass_time(ticks, 3 * patience, renewed) is None
    assert pass_time(ticks, patience, lambda: watched.failure([], True)) is None
    error = pass_time(ticks, SILENCE_S + 10, lambda: watched.failure([], True))
    assert str(error).endswith("; last heard: rollout-0: starting engine")


@pytest.mark.parametrize("state", [f"{FAILED}: out of memory", "stopped", "finished"])
def test_an_engine_that_ended_is_not_waited_for(tmp_path: Path, ticks: Ticks, state: str) -> None:
    watched = health(tmp_path, MinReplicas(patience_s=PATIENCE_S))
    StatusWriter(Run(tmp_path), "rollout-0", 1).write(state)
    assert pass_time(ticks, PATIENCE_S, lambda: watched.failure([], True)) is None
    assert pass_time(ticks, 2, lambda: watched.failure([], True))


def test_fewer_than_the_least(tmp_path: Path, ticks: Ticks) -> None:
    watched = health(tmp_path, MinReplicas(least=2, replicas=3, patience_s=PATIENCE_S))
    assert pass_time(ticks, 2 * PATIENCE_S, lambda: watched.failure(["rollout-0", "rollout-1"], True)) is None
    assert pass_time(ticks, PATIENCE_S, lambda: watched.failure(["rollout-0"], True)) is None
    error = pass_time(ticks, 2, lambda: watched.failure(["rollout-0"], True))
    assert str(error).startswith(
        "only 1 rollout workers have called, fewer than slurm.min_replicas (2), for 300 s (slurm.replica_patience"
    )


def test_given_up_ones_are_not_waited_for_unless_others_may_join(tmp_path: Path, ticks: Ticks) -> None:
    run = Run(tmp_path)
    StatusWriter(run, "rollout-0", 1).write(f"{GIVEN_UP}: out of memory")
    elastic = health(tmp_path, MinReplicas(replicas=2, elastic=True))
    fixed, one_left = health(tmp_path, MinReplicas(replicas=1)), health(tmp_path, MinReplicas(replicas=2))
    error = fixed.failure([], False)
    assert str(error) == (
        "no rollout worker has called, and 1 of 1 are given up; last heard: rollout-0: given up: out of memory"
    )
    assert pass_time(ticks, 60, lambda: one_left.failure([], True) or elastic.failure([], True)) is None


def test_scorers_are_counted_by_their_model(tmp_path: Path, ticks: Ticks) -> None:
    """Whoever else calls does not count, and who is given up is not waited for."""
    few = MinReplicas(
        patience_s=PATIENCE_S,
        replicas=2,
        what="teacher's scorer",
        setting="slurm.min_scorers",
        names={"scorer-1", "scorer-2"},
    )
    watched, others = health(tmp_path, few), ["rollout-0", "scorer-0"]
    assert pass_time(ticks, 2 * PATIENCE_S, lambda: watched.failure([*others, "scorer-2"], True)) is None
    StatusWriter(Run(tmp_path), "scorer-1", 1).write(f"{GIVEN_UP}: out of memory")
    StatusWriter(Run(tmp_path), "scorer-0", 1).write(f"{GIVEN_UP}: of another model")
    assert pass_time(ticks, PATIENCE_S, lambda: watched.failure(others, True)) is None
    error = pass_time(ticks, 2, lambda: watched.failure(others, True))
    assert str(error) == (
        "no teacher's scorer has called for 300 s (slurm.replica_patience_minutes); last heard: scorer-1: given up: out of memory"
    )
    StatusWriter(Run(tmp_path), "scorer-2", 1).write(f"{GIVEN_UP}: no such file")
    error = pass_time(ticks, 10, lambda: health(tmp_path, few).failure(others, False))
    assert str(error).startswith("no teacher's scorer has called, and 2 of 2 are given up; last heard: scorer-1: given")
    two = MinReplicas(
        least=2, patience_s=5, replicas=2, what="teacher's scorer", setting="slurm.min_scorers", names=few.names
    )
    watched = health(tmp_path, two)
    error = pass_time(ticks, 10, lambda: watched.failure(["scorer-1"], True))
    assert str(error).startswith("only 1 teacher's scorers have called, fewer than slurm.min_scorers (2),")


def test_leases_of_an_earlier_attempt_tell_nothing(tmp_path: Path) -> None:
    StatusWriter(Run(tmp_path), "rollout-0", 1).write(f"{GIVEN_UP}: out of memory")
    assert ReplicaHealth(Run(tmp_path), 2, MinReplicas()).failure([], False) is None


def failed(index: int, count: int) -> list[str]:
    return [f"group {index}: sample {sample} failed" for sample in range(count)]


@pytest.mark.parametrize(
    ("counts", "ends"), [([0, 2, 0], False), ([0, 2, 1], True), ([4, 4, 0], True), ([2, 0, 0, 0, 2], False)]
)
def test_as_many_of_the_newest_samples_as_a_step_has(counts: list[int], ends: bool) -> None:
    """At most half of four samples in two groups."""
    failures = FailureWindow(0.5, groups=2)
    found = [
        failures.add(
            group_meta(
                rewards=[0.0] * 2,
                lengths=[2] * 2,
                response_lengths=[1] * 2,
                stop_reasons=["stop"] * 2,
                failures=failed(at, count),
            )
        )
        for at, count in enumerate(counts)
    ]
    assert found[0] is None, "one group is not a step"
    assert any(found) == ends


def test_a_run_whose_environment_always_fails_ends_with_the_last_failure(tmp_path: Path) -> None:
    run = make_run(tmp_path / "project" / "run")
    controller = service(run, eval_interval=0, max_failed_ratio=0.25)
    controller.start(0)
    groups = [finish(run, item, 0) for item in controller.claim("rollout-0", 0, 2)]
    assert len(groups) == 2
    controller.complete([replace(groups[0], failures=failed(0, 2))])
    assert controller.failure is None
    controller.complete([groups[1]])
    assert isinstance(controller.failure, UserCodeError)
    assert "2 of the newest 4 samples" in str(controller.failure)
    assert "environment.max_failed_ratio = 0.25; the last: group 0: sample 1 failed" in str(controller.failure)


def test_failed_samples_are_counted(tmp_path: Path) -> None:
    run = make_run(tmp_path / "project" / "run")
    controller = service(run, eval_interval=0)
    controller.start(0)
    first, second = (finish(run, item, 0) for item in controller.claim("rollout-0", 0, 2))
    controller.complete([replace(first, failures=failed(0, 1)), second])
    assert controller.batch(1) is not None
    assert merged(run)[1]["generate/failed_samples"] == 1
