"""`hpcrl bench` on a real Slurm: through the queue, processes killed on their nodes, requeued by Slurm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.jobs.small_run import HPCRL
from tests.paths import ROOT
from tests.slurm.conftest import DevCluster

SITE = str(ROOT / "slurm" / "sites" / "devcluster.toml")


@pytest.mark.faults_slow
def test_bench_of_three_nodes_one_with_a_scorer(cluster: DevCluster, tmp_path: Path) -> None:
    words = [
        HPCRL,
        "bench",
        SITE,
        f"slurm.root={tmp_path}/runs",
        "trainer.algorithm.use_kl_loss=true",
        "trainer.placement.colocate_policy_ref=false",
        "trainer.placement.policy_num_nodes=1",
        "--nodes",
        "3",
        "--minutes",
        "60",
        "-o",
        str(tmp_path),
    ]
    done = cluster.run(words, timeout=3900, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.glob("bench-*.json")
    assert file.with_suffix(".html").is_file()
    report = json.loads(file.read_text())
    found = {figure["key"]: figure for figure in report["figures"]}
    assert len(report["hosts"]) == 3, report["hosts"]
    assert {figure["level"] for figure in report["figures"] if figure["part"] == "correct"} == {"ok"}
    for key in ("resumed_difference", "torn", "damaged", "unproven"):
        assert found[key]["value"] == 0, found[key]
    for role in ("rollout", "trainer", "scorer", "controller"):
        assert 0 < found[f"{role}_next_step_seconds"]["value"] < 3600
    assert 0 < found["goodput"]["value"] < 1
    assert found["first_step_seconds"]["value"] > 0
    assert cluster.ask(["squeue", "-h"]) == ""
