"""Whole runs on a real Slurm of several nodes: two trainer nodes (FSDP2 over gloo) and two rollout nodes (one vLLM replica each)."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hpcrl.rundir.commit import committed
from hpcrl.rundir.layout import Run, step_of
from hpcrl.rundir.ledger import outcome_of, read_attempts
from tests.jobs.small_run import HPCRL, SMALL, curve, kill, logs_of, pid_of, trained_groups, wait_for
from tests.paths import QUICKSTART, ROOT
from tests.slurm.conftest import DevCluster

SITE = str(ROOT / "slurm" / "sites" / "devcluster.toml")
FOUR_NODES = ["trainer.placement.policy_num_nodes=2", "generator.inference_engine.num_engines=2"]


def submit(cluster: DevCluster, cwd: Path, name: str, *settings: str) -> str:
    arguments = [str(QUICKSTART), SITE, f"trainer.run_name={name}", *SMALL, *FOUR_NODES, *settings]
    done = cluster.run([HPCRL, "submit", *arguments], cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def ask(cluster: DevCluster, cwd: Path, *arguments: str) -> str:
    done = cluster.run([HPCRL, *arguments], cwd=cwd)
    return done.stdout + done.stderr


def finish(cluster: DevCluster, cwd: Path, run: Run, attempt: int, seconds: float = 300) -> str:
    wait_for(lambda: outcome_of(run, attempt), lambda: logs_of(run) + ask(cluster, cwd, "status"), seconds)
    wait_for(lambda: not cluster.ask(["squeue", "-h"]), lambda: cluster.ask(["squeue"]), 60)
    outcome = outcome_of(run, attempt)
    assert outcome is not None
    return outcome.kind


@pytest.mark.faults_slow
def test_sweep_of_two_is_one_array_with_two_runs(cluster: DevCluster, tmp_path: Path) -> None:
    sweep = ["--sweep", "trainer.policy.optimizer_config.lr=1e-4,3e-4", "trainer.max_steps=2"]
    said = submit(cluster, tmp_path, "sweep", *sweep)
    runs = [Run.open(tmp_path / "runs" / "quickstart" / f"sweep.{i}-lr-{lr}") for i, lr in enumerate(["1e-4", "3e-4"])]
    assert f"sweep.1-lr-3e-4: slurm job {cluster.ask(['squeue', '-h', '-o', '%F']).split()[0]}_1" in said
    for run in runs:
        wait_for(
            lambda run=run: outcome_of(run, 1), lambda run=run: logs_of(run) + ask(cluster, tmp_path, "status"), 300
        )
    assert [finish(cluster, tmp_path, run, 1) for run in runs] == ["done", "done"], "\n".join(map(logs_of, runs))
    for run, lr in zip(runs, (1e-4, 3e-4), strict=True):
        assert f"lr = {lr}" in run.config.read_text()
        assert list(curve(run, "policy/policy_lr")) == [1, 2]
        assert list(curve(run, "eval/all/avg_score")) == [0, 2]
        assert read_attempts(run)[0].hosts == ["n1", "n2", "n3", "n4"]
    assert trained_groups(runs[0]) == trained_groups(runs[1])
    status = ask(cluster, tmp_path, "status")
    assert status.count("done") == 2, status
    assert ask(cluster, tmp_path, "status", "sweep.1").startswith("sweep.1-lr-3e-4: done")


@pytest.mark.faults_slow
def test_dead_rank_ends_the_attempt_and_the_run_goes_on_by_itself(cluster: DevCluster, tmp_path: Path) -> None:
    submit(cluster, tmp_path, "killed", "trainer.max_steps=5")
    run = Run.open(tmp_path / "runs" / "quickstart" / "killed")
    wait_for(lambda: committed(run.checkpoints, step_of), lambda: logs_of(run) + ask(cluster, tmp_path, "status"), 300)
    assert "running" in ask(cluster, tmp_path, "status", "killed")
    kill(pid_of(run, "train"))
    began = time.monotonic()
    wait_for(lambda: outcome_of(run, 1), lambda: logs_of(run), 30)
    assert time.monotonic() - began < 10
    outcome = outcome_of(run, 1)
    assert outcome is not None
    assert (outcome.kind, outcome.host in ("n1", "n2")) == ("failed", True), outcome
    assert "SIGKILL" in outcome.message or "-9" in outcome.message

    assert finish(cluster, tmp_path, run, 2) == "done", logs_of(run)
    assert "1/trainer-1 | " in ask(cluster, tmp_path, "logs", "killed", "--role", "trainer", "--attempt", "1")
    groups = trained_groups(run)
    assert len({group for batch in groups for group in batch}) == 5 * 8
    assert list(curve(run, "policy/grad_norm")) == [1, 2, 3, 4, 5]


def start_and_preempt(cluster: DevCluster, cwd: Path) -> tuple[Run, int]:
    """Let a job of a higher partition take all nodes of a run: it saves and is requeued. Return the run and the step that was saved."""
    many = ["trainer.max_steps=500", "trainer.eval_interval=0", "trainer.ckpt_interval=100"]
    arguments = [str(QUICKSTART), SITE, "trainer.run_name=preempted", *SMALL, *many]
    assert cluster.run([HPCRL, "submit", *arguments], cwd=cwd).returncode == 0
    run = Run.open(cwd / "runs" / "quickstart" / "preempted")
    wait_for(lambda: run.batch(4).exists(), lambda: logs_of(run) + ask(cluster, cwd, "status"), 180)
    cluster.ask(["sbatch", "-p", "high", "-N4", "--exclusive", "-t1", "-o", "/dev/null", "--wrap", "sleep 3"])
    wait_for(lambda: outcome_of(run, 1), lambda: logs_of(run), 30)
    outcome = outcome_of(run, 1)
    assert outcome is not None
    assert outcome.kind == "interrupted", outcome
    saved = committed(run.checkpoints, step_of)
    trained = list(curve(run, "policy/grad_norm"))
    assert saved == trained[-1:], "what was trained was saved, once"
    wait_for(lambda: run.batch(saved[0] + 3).exists(), lambda: logs_of(run) + ask(cluster, cwd, "status"), 180)
    return run, saved[0]


def cancel_and_compare(cluster: DevCluster, cwd: Path, run: Run, attempt: int) -> None:
    """Cancel a run in this attempt: it saves, is not requeued, and has trained each group once."""
    assert "preempted: cancelled" in ask(cluster, cwd, "cancel", "preempted")
    assert finish(cluster, cwd, run, attempt) == "cancelled", logs_of(run)
    assert len(read_attempts(run)) == attempt
    trained = list(curve(run, "policy/grad_norm"))
    assert trained == list(range(1, len(trained) + 1))
    assert committed(run.checkpoints, step_of)[-1] == trained[-1], "what was trained was saved"
    groups = [group for batch in trained_groups(run) for group in batch]
    assert len(set(groups)) == len(groups) >= len(trained) * 8


def test_preempted_run_saves_and_comes_back_and_is_cancelled(cluster: DevCluster, tmp_path: Path) -> None:
    run, saved = start_and_preempt(cluster, tmp_path)
    cancel_and_compare(cluster, tmp_path, run, 2)
    assert len(curve(run, "policy/grad_norm")) > saved


@pytest.mark.faults_slow
def test_preempted_run_comes_back_after_a_crash_too(cluster: DevCluster, tmp_path: Path) -> None:
    """Its second attempt loses the controller, and is requeued as well."""
    run, _ = start_and_preempt(cluster, tmp_path)
    kill(pid_of(run, "controller"))
    wait_for(lambda: outcome_of(run, 2), lambda: logs_of(run), 30)
    outcome = outcome_of(run, 2)
    assert outcome is not None
    assert (outcome.kind, "SIGKILL" in outcome.message) == ("failed", True), outcome
    before = len(curve(run, "policy/grad_norm"))
    wait_for(
        lambda: len(curve(run, "policy/grad_norm")) > before + 1,
        lambda: logs_of(run) + ask(cluster, tmp_path, "status"),
        180,
    )
    cancel_and_compare(cluster, tmp_path, run, 3)


@pytest.mark.faults_slow
def test_preempted_run_of_resume_mode_none_is_not_requeued(cluster: DevCluster, tmp_path: Path) -> None:
    settings = ["trainer.resume_mode=none", "trainer.max_steps=30", "trainer.eval_interval=0"]
    submit(cluster, tmp_path, "once", *settings)
    run = Run.open(tmp_path / "runs" / "quickstart" / "once")
    wait_for(lambda: run.batch(3).exists(), lambda: logs_of(run) + ask(cluster, tmp_path, "status"), 180)
    cluster.ask(["sbatch", "-p", "high", "-N4", "--exclusive", "-t1", "-o", "/dev/null", "--wrap", "sleep 3"])
    assert finish(cluster, tmp_path, run, 1) == "interrupted", logs_of(run)
    assert len(read_attempts(run)) == 1
    assert "not requeued, because trainer.resume_mode is none" in ask(cluster, tmp_path, "status", "once")


def test_run_that_asks_for_gpus_never_trains_on_cpus(cluster: DevCluster, tmp_path: Path) -> None:
    """Slurm gives the nodes GPUs that torch does not see: said before anything is loaded, with what was found."""
    two_nodes = ["trainer.placement.policy_num_nodes=1", "generator.inference_engine.num_engines=1"]
    submit(cluster, tmp_path, "gpus", *two_nodes, "slurm.gpus_per_node=1", "slurm.crash_budget=1")
    run = Run.open(tmp_path / "runs" / "quickstart" / "gpus")
    assert finish(cluster, tmp_path, run, 1) == "failed"
    outcome = outcome_of(run, 1)
    assert outcome is not None
    assert outcome.message.startswith("DeviceError: 1 GPU(s) are needed on this node, and torch 2."), outcome
    assert "CUDA_VISIBLE_DEVICES='0'" in outcome.message
    assert outcome.host in ("n1", "n2", "n3", "n4")
    assert not run.log(1, "controller").exists(), "nothing was started"


def test_refusals_of_the_real_sbatch_leave_nothing(cluster: DevCluster, tmp_path: Path) -> None:
    done = cluster.run([HPCRL, "submit", str(QUICKSTART), SITE, "slurm.partition=nope"], cwd=tmp_path)
    assert done.returncode == 3
    assert "invalid partition specified: nope" in done.stderr
    assert not list(tmp_path.iterdir())
    assert cluster.ask(["squeue", "-h"]) == ""


def test_pending_sweep_says_why_and_is_cancelled_at_once(cluster: DevCluster, tmp_path: Path) -> None:
    settings = ["generator.inference_engine.num_engines=7", "--sweep", "trainer.seed=1,2"]
    submit(cluster, tmp_path, "large", *settings)
    assert "large.1-seed-2: pending: Partition" in ask(cluster, tmp_path, "status", "large.1")
    cancelled = ask(cluster, tmp_path, "cancel", "large").splitlines()
    assert sorted(line.partition(": cancelled")[0] for line in cancelled) == ["large.0-seed-1", "large.1-seed-2"]
    assert ask(cluster, tmp_path, "status", "large").count("cancelled by the user") == 2
    assert cluster.ask(["squeue", "-h"]) == ""
