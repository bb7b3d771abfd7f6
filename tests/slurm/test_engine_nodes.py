"""A whole run whose only replica is on two nodes: one worker of vLLM's CPU build on each, which share every layer or all of them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from hpcrl.engines.vllm.processes import group_of
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import read_attempts
from tests.jobs.small_run import HPCRL, SMALL, curve, kill, logs_of, trained_groups, wait_for
from tests.paths import QUICKSTART
from tests.processes import command_of, processes_of, variable
from tests.slurm.conftest import DevCluster
from tests.slurm.test_runs import SITE, ask, finish

STEPS = 6
SPREAD = {"PYTHONPATH": str(Path(__file__).with_name("spread")), "SPREAD_NODES": "2"}
SETUP = ["export HF_HUB_OFFLINE=1", *(f"export {name}='{value}'" for name, value in SPREAD.items())]
MISMATCH = "policy/rollout_train_logprobs_abs_diff_mean"


def workers(run: Run, part: str | None) -> list[int]:
    """Return vLLM's workers on the replica's second node, or with None on its first one."""
    servers = [pid for pid in processes_of(run) if "hpcrl.engines.vllm.main" in command_of(pid)]
    (server,) = [pid for pid in servers if variable(pid, "HPCRL_PART") == part]
    return [pid for pid in group_of(server) if command_of(pid).startswith("VLLM::Worker")]


@pytest.mark.faults_slow
@pytest.mark.parametrize(
    ("shared", "eager"), [("tensor", "true"), ("pipeline", "false")]
)  # see config/rules/cluster.py
def test_a_replica_on_two_nodes_takes_new_weights_and_survives_the_end_of_a_part(
    cluster: DevCluster, tmp_path: Path, shared: str, eager: str
) -> None:
    settings = [
        *("trainer.run_name=spread", *SMALL, f"trainer.max_steps={STEPS}", "trainer.eval_interval=0"),
        *("generator.inference_engine.backend=vllm", f"generator.inference_engine.{shared}_parallel_size=2"),
        f"generator.inference_engine.enforce_eager={eager}",
        f"slurm.setup={json.dumps(SETUP)}",
    ]
    done = cluster.run([HPCRL, "submit", str(QUICKSTART), SITE, *settings], cwd=tmp_path, env=os.environ | SPREAD)
    assert done.returncode == 0, done.stderr
    run = Run.open(tmp_path / "runs" / "quickstart" / "spread")

    def seen() -> str:
        return logs_of(run) + ask(cluster, tmp_path, "status")

    wait_for(run.batch(3).exists, seen, 600)
    assert read_attempts(run)[0].hosts == ["n1", "n2", "n3"]
    first, second = workers(run, None), workers(run, "0")
    assert (len(first), len(second)) == (1, 1), "each node has one"
    kill(second[0])
    assert finish(cluster, tmp_path, run, 1, 600) == "done", logs_of(run)
    told = run.log(1, "agent-1").read_text()
    assert re.search(r"rollout-0: EngineError: the inference engine .*; to be started again \(1\)", told), told
    assert "part-0: " in run.log(1, "agent-2").read_text()
    assert list(curve(run, "policy/grad_norm")) == list(range(1, STEPS + 1))
    assert len({group for batch in trained_groups(run) for group in batch}) == 8 * STEPS
    assert max(curve(run, MISMATCH).values()) < 1e-3, "each step's weights reached both workers"
