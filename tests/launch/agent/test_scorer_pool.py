"""Elastic pools of scorers: a job array for each model, which every command knows, and an element of one over a stand-in for the scorer's job."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from hpcrl.config import Config
from hpcrl.config.scorers import scorer_number, scorer_sets
from hpcrl.launch.agent.environment import Environments
from hpcrl.launch.nodes import make_plan, needed_nodes
from hpcrl.launch.pools import describe_pools, elastic_pools, pooled_node
from hpcrl.launch.requeue.elastic import AGAIN, unwanted
from hpcrl.rundir.commit import write_json, write_text
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import open_attempt, outcome_of, report_outcome
from tests.launch.agent.test_pool import (
    GANG,
    POOL,
    batch_end,
    called,
    element,
    make_run,
    numbering_slurm,
    record,
    wait_for,
)
from tests.launch.submit.test_submit import called as hpcrl
from tests.launch.submit.test_submit import nothing_made
from tests.paths import QUICKSTART
from tests.processes import is_gone

SCORES = """
import os, sys, time
from pathlib import Path
run = Path(sys.argv[1])
(run / f"scores-{os.environ['HPCRL_ATTEMPT']}-{os.environ['HPCRL_SCORER']}").write_text(str(os.getpid()))
time.sleep(60)
"""
TEACHERS, REFERENCE = "slurm.elastic_scorers.teacher", "slurm.elastic_scorers.reference"
SCORED = [
    "trainer.distillation.enable=true",
    "trainer.distillation.model_path=t",
    "trainer.distillation.source_models={math='m'}",
    "trainer.distillation.placement.fsdp_size=2",
    "trainer.placement.colocate_policy_ref=false",
    f"{TEACHERS}.replicas=2",
    f"{REFERENCE}.replicas=1",
]
ON_GPUS = ["slurm.gpus_per_node=h100:4", "slurm.cpus_per_task=32", "slurm.partition=main"]


def test_each_model_has_a_pool_whose_scorers_come_after_those_of_the_run() -> None:
    config = Config.from_toml([QUICKSTART], [*SCORED, *ON_GPUS, "slurm.elastic.replicas=1"])
    general, maths, reference = scorer_sets(config)
    replicas, *scorers = elastic_pools(config)
    assert replicas.workers == ["rollout-1"]
    assert [(pool.name, pool.workers, pool.nodes[0].gpus) for pool in scorers] == [
        (general.name, ["scorer-3", "scorer-4"], 2),
        (maths.name, ["scorer-5", "scorer-6"], 2),
        (reference.name, ["scorer-7"], 1),
    ]
    models = [scorer_number(config, number).name for number in range(8)]
    names = [general.name, maths.name, reference.name]
    assert models == [*names, general.name, general.name, maths.name, maths.name, reference.name]
    plan = make_plan(config)
    assert [node.workers for node in plan if node.role == "scorer"] == [[f"scorer-{number}"] for number in range(3)]
    assert needed_nodes(plan, 1) == [0], "the pools have copies of every model"
    indices = [node.index for pool in (replicas, *scorers) for node in pool.nodes]
    assert indices == list(range(len(plan), len(plan) + 6))
    assert describe_pools(elastic_pools(config), config)[1] == "elastic: scorer-3, scorer-4 (teacher), partition main"


def test_an_element_has_the_devices_and_cores_of_its_ranks(tmp_path: Path) -> None:
    config = Config.from_toml([QUICKSTART], [*SCORED, *ON_GPUS])
    node = pooled_node(config, "scorer-4")
    assert (node.role, node.scorer_ranks, node.torchrun, node.gpus) == ("scorer", 2, True, 2)
    given = Environments(config, node, 1, "127.0.0.1", None, tmp_path, False).of("scorer-4")
    assert given["OMP_NUM_THREADS"] == "8", "half a node's 32 cores, for two ranks"


def test_the_run_may_have_no_copy_of_its_own() -> None:
    config = Config.from_toml([QUICKSTART], [*SCORED, "trainer.distillation.placement.num_replicas=0"])
    assert [node.workers for node in make_plan(config) if node.role == "scorer"] == [["scorer-0"]]
    assert elastic_pools(config)[0].workers == ["scorer-1", "scorer-2"]


def test_an_element_has_its_scorer_in_attempt_after_attempt(tmp_path: Path) -> None:
    run = make_run(tmp_path, "", "trainer.placement.colocate_policy_ref=false", f"{REFERENCE}.replicas=2")
    write_text(run.code / "jobs" / "scorer.py", SCORES)
    record(run, GANG, "8", **{"reference-1": POOL})

    def scoring(attempt: int) -> int:
        path = run.path / f"scores-{attempt}-2"
        wait_for(lambda: path.exists() and path.read_text(), f"attempt {attempt} has no scorer")
        return int(path.read_text())

    with element(run, "scorer-2") as process:
        open_attempt(run, f"{GANG}.0", ["n1"])
        first = scoring(1)
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: (run.path / "scores-1-2").read_text() not in ("", str(first)), "it is not started again")
        again = scoring(1)
        report_outcome(run, 1, "interrupted", "saved", "agent-0")
        wait_for(lambda: is_gone(again), "the scorer of attempt 1 goes on")
        open_attempt(run, f"{GANG}.1", ["n1"])
        second = scoring(2)
        process.terminate()
        assert process.wait(30) == AGAIN
    assert is_gone(second)
    assert outcome_of(run, 2) is None, "the run goes on"
    assert "scorer-2: killed by SIGKILL" in run.log(1, "agent-pool-scorer-2").read_text()


def test_every_array_of_a_run_is_wanted_until_it_ends(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    record(run, GANG, None, **{"teacher-1": "10", "reference-1": "11"})
    assert unwanted(run, "10") is None
    assert unwanted(run, "11") is None
    assert unwanted(run, POOL) == "the run has another pool, or none any more"
    record(run, f"{POOL}_1", "12", **{"teacher-1": "13"})
    open_attempt(run, f"{POOL}_1.0", ["n1"])
    report_outcome(run, 1, "done", "finished", "agent-0")
    write_json(tmp_path / "elements.json", [None, str(run.path)])
    with batch_end(tmp_path, "hpcrl.launch.requeue.epilogue", str(tmp_path / "elements.json"), "0") as process:
        assert process.wait(30) == 0
    assert called(tmp_path) == ["scancel 12", "scancel 13"]


def test_a_record_of_an_earlier_version_names_one_pool(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_json(run.submission, {"executor": "slurm", "job_id": GANG, "pool": POOL, "submitted": time.time()})
    assert unwanted(run, POOL) is None
    assert unwanted(run, "6") == "the run has another pool, or none any more"


def test_a_dry_run_shows_the_pool_of_each_model(tmp_path: Path) -> None:
    model = str(QUICKSTART.parent / "quickstart" / "teacher")
    own = [
        *ON_GPUS,
        "trainer.algorithm.use_kl_loss=false",
        "trainer.distillation.enable=true",
        f"trainer.distillation.model_path={model}",
        "trainer.distillation.placement.fsdp_size=2",
        f"{TEACHERS}={{replicas=3, at_once=2, partition='spare', time_minutes=90}}",
    ]
    done = hpcrl("submit", QUICKSTART, "--dry-run", "--script", *own, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    gang, _, pool = done.stdout.partition("# batch script of the elastic pool of teacher-")
    assert "--gpus-per-node=h100:4" in gang
    for option in ("array=0-2%2", "partition=spare", "gpus-per-node=h100:2", "cpus-per-task=16", "dependency=after:"):
        assert f"#SBATCH --{option}" in pool, option
    assert "-pool-teacher-" in pool.partition("#SBATCH --job-name=")[2].splitlines()[0]
    assert "elastic: scorer-1, scorer-2, scorer-3 (teacher), partition spare" in done.stdout


def test_this_machine_has_no_pool_of_scorers(tmp_path: Path) -> None:
    settings = ["trainer.placement.colocate_policy_ref=false", f"{REFERENCE}.replicas=2"]
    done = hpcrl("submit", QUICKSTART, "--local", *settings, cwd=tmp_path)
    assert done.returncode == 3
    expected = f"{REFERENCE}.replicas: this machine has no partitions; with --local, set it to 0 and trainer.placement.ref_num_nodes higher"
    assert expected in done.stderr
    assert nothing_made(tmp_path)


@pytest.mark.faults_slow
def test_a_resumed_run_has_new_pools_and_not_the_old_ones_too(tmp_path: Path) -> None:
    path = numbering_slurm(tmp_path)
    settings = ["slurm.elastic.replicas=2", f"{REFERENCE}.replicas=2", "trainer.placement.colocate_policy_ref=false"]
    done = hpcrl("submit", QUICKSTART, "trainer.run_name=mine", *settings, cwd=tmp_path, PATH=path)
    assert done.returncode == 0, done.stderr
    run = Run(tmp_path / "runs" / "quickstart" / "mine")
    first = json.loads(run.submission.read_text())
    (name,) = first["scorer_pools"]
    assert name.startswith("reference-")
    assert (first["job_id"], first["pool"], first["scorer_pools"][name]) == ("1_0", "2", "3")
    done = hpcrl("resume", "mine", f"{REFERENCE}.replicas=1", cwd=tmp_path, PATH=path)
    assert done.returncode == 0, done.stderr
    second = json.loads(run.submission.read_text())
    assert (second["job_id"], second["pool"], second["scorer_pools"]) == ("4_0", "5", {name: "6"})
    assert called(tmp_path) == ["scancel 2", "scancel 3"]
