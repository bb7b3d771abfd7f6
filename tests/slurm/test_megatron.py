"""Whole runs with Megatron-core on a real Slurm: the trainer's two ranks on two nodes, and a node with real vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hpcrl.rundir.commit import committed, read_json
from hpcrl.rundir.layout import Run, step_of
from hpcrl.rundir.ledger import outcome_of, read_attempts
from tests.jobs.small_run import HPCRL, SMALL, curve, kill, logs_of, pid_of, trained_groups, wait_for
from tests.paths import QUICKSTART
from tests.slurm.conftest import DevCluster
from tests.slurm.test_runs import SITE, ask, finish

MEGATRON = QUICKSTART.with_name("quickstart_megatron.toml")
TWO_NODES = ["trainer.placement.policy_num_nodes=2", "trainer.placement.policy_num_gpus_per_node=1"]
TRAINED = {"all": [], "adapters": ["trainer.policy.model.lora.rank=8", "trainer.policy.optimizer_config.lr=2e-3"]}
MISMATCH = "policy/rollout_train_logprobs_abs_diff_mean"


def submit(cluster: DevCluster, cwd: Path, name: str, *settings: str) -> Run:
    arguments = [str(MEGATRON), SITE, f"trainer.run_name={name}", *TWO_NODES, *settings]
    done = cluster.run([HPCRL, "submit", *arguments], cwd=cwd)
    assert done.returncode == 0, done.stderr
    return Run.open(cwd / "runs" / "quickstart_megatron" / name)


def sizes(nodes: int, **of_each: int) -> list[str]:
    """Return settings for policy and reference on so many nodes."""
    of_models = [
        f"trainer.{role}.megatron_config.{name}_model_parallel_size={size}"
        for role in ("policy", "ref")
        for name, size in of_each.items()
    ]
    return [f"trainer.placement.policy_num_nodes={nodes}", *of_models]


def reach(cluster: DevCluster, cwd: Path, run: Run, step: int) -> None:
    wait_for(run.batch(step).exists, lambda: logs_of(run) + ask(cluster, cwd, "status"), 240)


@pytest.mark.faults_slow
def test_killed_and_resumed_with_other_sizes(cluster: DevCluster, tmp_path: Path) -> None:
    """A rank dies and the run goes on by itself; then a person resumes it on one rank, and on two pipeline stages."""
    often = ["trainer.max_steps=500", "trainer.eval_interval=0", "trainer.hf_save_interval=2"]
    run = submit(cluster, tmp_path, "sizes", *SMALL, "trainer.policy_mini_batch_size=4", *often)
    wait_for(lambda: committed(run.checkpoints, step_of), lambda: logs_of(run) + ask(cluster, tmp_path, "status"), 240)
    kill(pid_of(run, "train"))
    wait_for(lambda: outcome_of(run, 1), lambda: logs_of(run), 30)
    outcome = outcome_of(run, 1)
    assert outcome is not None
    assert (outcome.kind, outcome.host in ("n1", "n2")) == ("failed", True), outcome

    saved = []
    for attempt, layout in ((2, sizes(1, tensor=1)), (3, sizes(2, pipeline=2))):
        wait_for(lambda attempt=attempt: len(read_attempts(run)) == attempt, lambda: logs_of(run), 120)
        reach(cluster, tmp_path, run, max(curve(run, "policy/grad_norm")) + 4)
        assert "sizes: cancelled" in ask(cluster, tmp_path, "cancel", "sizes")
        assert finish(cluster, tmp_path, run, attempt) == "cancelled"
        saved.append(max(curve(run, "policy/grad_norm")))
        last = [f"trainer.max_steps={saved[-1] + 4}"] if attempt == 3 else []
        told = ask(cluster, tmp_path, "resume", "sizes", *layout, *last)
        assert "(the state is spread over other processes" in told, told
    assert finish(cluster, tmp_path, run, 4) == "done", logs_of(run)

    end = saved[-1] + 4
    assert [len(attempt.hosts) for attempt in read_attempts(run)] == [3, 3, 2, 3]
    assert list(curve(run, "policy/grad_norm")) == list(range(1, end + 1))
    assert len({group for batch in trained_groups(run) for group in batch}) == end * 8
    assert max(curve(run, MISMATCH).values()) < 1e-4, "vLLM has other weights than the trainer"
    for number, step in enumerate(saved, start=3):
        assert f"continuing after step {step}" in run.log(number, "trainer-0").read_text()
    exported = tmp_path / "exported"
    assert str(exported) in ask(cluster, tmp_path, "checkpoint", "export", "sizes", str(end), "-o", str(exported))
    by_run, by_hand = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (run.export(end), exported)
    )
    for name, parameter in by_run.named_parameters():
        assert torch.equal(parameter, by_hand.get_parameter(name)), name


@pytest.mark.slow
@pytest.mark.parametrize("trained", TRAINED)
def test_quickstart_over_two_nodes(cluster: DevCluster, tmp_path: Path, trained: str) -> None:
    """Each matrix lies on two nodes, and the policy learns what it learns with FSDP2."""
    run = submit(cluster, tmp_path, f"learns-{trained}", *TRAINED[trained])
    assert finish(cluster, tmp_path, run, 1, 1200) == "done", logs_of(run)
    before, after = (read_json(run.evals_of(version) / "summary.json") for version in (0, 30))
    assert before is not None
    assert after is not None
    scores = [summary["eval/all/avg_score"] for summary in (before, after)]
    print(f"Megatron-core over two nodes, {trained}: {scores[0]:.3f} -> {scores[1]:.3f}")
    assert scores[0] < 0.5
    assert scores[1] >= 0.95
