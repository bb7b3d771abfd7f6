"""A run whose replicas are an elastic pool on a partition of lower priority, on a real Slurm and with real vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcrl.observe.metrics import merged
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import outcome_of
from hpcrl.runtime.process_status import ProcessStatus, read_process_statuses
from tests.jobs.small_run import HPCRL, SMALL, logs_of, trained_groups, wait_for
from tests.paths import QUICKSTART
from tests.processes import processes_of
from tests.slurm.conftest import DevCluster
from tests.slurm.test_runs import SITE, ask

POOL = [
    "slurm.partition=high",
    "slurm.exclusive=true",
    "generator.inference_engine.num_engines=0",
    "slurm.elastic.replicas=2",
    "slurm.elastic.partition=main",
    "slurm.elastic.cpus_per_task=1",
    "slurm.elastic.extra={exclusive=true}",
]


def process_statuses(run: Run) -> dict[str, ProcessStatus]:
    return {
        process_status.process: process_status
        for process_status in read_process_statuses(run, 1)
        if process_status.process.startswith("rollout-")
    }


@pytest.mark.faults_slow
def test_replicas_of_a_pool_come_go_and_end_with_the_run(cluster: DevCluster, tmp_path: Path) -> None:
    settings = ["trainer.run_name=pool", *SMALL, *POOL, "trainer.max_steps=2000", "trainer.eval_interval=0"]
    done = cluster.run([HPCRL, "submit", str(QUICKSTART), SITE, *settings], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = Run.open(tmp_path / "runs" / "quickstart" / "pool")
    pool = json.loads(run.submission.read_text())["pool"]

    def logs() -> str:
        return cluster.ask(["squeue", "-r"]) + ask(cluster, tmp_path, "status", "pool") + logs_of(run)

    def both_serve() -> bool:
        return sorted(process_statuses(run)) == ["rollout-0", "rollout-1"] and all(
            process_status.state.startswith(("generating", "ready"))
            for process_status in process_statuses(run).values()
        )

    def restarts() -> float:
        return max((values.get("replicas/restarts", 0) for values in merged(run).values()), default=0)

    wait_for(both_serve, logs, 240)
    wait_for(lambda: run.batch(2).exists(), logs, 60)
    before = {name: process_status.pid for name, process_status in process_statuses(run).items()}

    # three nodes are the pool's and an idle one: the job takes that and one of the pool's
    cluster.ask(["sbatch", "-p", "high", "-N2", "--exclusive", "-t1", "-o", "/dev/null", "--wrap", "sleep 8"])
    wait_for(
        lambda: any(process_status.state == "stopped" for process_status in process_statuses(run).values()), logs, 60
    )
    (taken,) = [name for name, process_status in process_statuses(run).items() if process_status.state == "stopped"]
    steps = len(trained_groups(run))
    wait_for(lambda: run.batch(steps + 2).exists(), logs, 60)  # with the one that is left
    wait_for(lambda: both_serve() and restarts() >= 1, logs, 180)
    assert process_statuses(run)[taken].pid != before[taken]
    kept = ({"rollout-0", "rollout-1"} - {taken}).pop()
    assert process_statuses(run)[kept].pid == before[kept], "the other one was left alone"
    assert "Restarts=1" in cluster.ask(["scontrol", "show", "job", "-o", f"{pool}_{taken.removeprefix('rollout-')}"])
    values = [metrics["replicas/ready"] for _, metrics in sorted(merged(run).items()) if "replicas/ready" in metrics]
    assert {1.0, 2.0} <= set(values)

    assert "pool: cancelled" in ask(cluster, tmp_path, "cancel", "pool")
    wait_for(lambda: not cluster.ask(["squeue", "-h"]), logs, 60)
    wait_for(lambda: not processes_of(run), lambda: f"left over: {processes_of(run)}", 100)
    outcome = outcome_of(run, 1)
    assert outcome
    assert outcome.kind == "cancelled"
    groups = [group for batch in trained_groups(run) for group in batch]
    assert len(groups) == len(set(groups))
    assert sorted(groups) == [f"g{index:08d}" for index in range(len(groups))], "none was lost with its replica"


def test_a_pool_that_slurm_refuses_takes_the_run_with_it(cluster: DevCluster, tmp_path: Path) -> None:
    settings = [*POOL, "slurm.elastic.partition=nope"]
    done = cluster.run([HPCRL, "submit", str(QUICKSTART), SITE, *settings], cwd=tmp_path)
    assert done.returncode == 3
    assert "invalid partition specified: nope" in done.stderr
    assert not list(tmp_path.iterdir())
    wait_for(lambda: not cluster.ask(["squeue", "-h"]), lambda: cluster.ask(["squeue"]), 30)
