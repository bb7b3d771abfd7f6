"""Two requests for one run that start in the same second, on a real Slurm: real batch scripts, with a stand-in for the agents."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from hpcrl.config import Config
from hpcrl.launch.submit.executors import Element, Submission, batch_scripts
from hpcrl.rundir.commit import write_json, write_text
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import outcome_of, read_attempts
from tests.jobs.small_run import wait_for
from tests.paths import CONFIGS, ROOT
from tests.slurm.conftest import DevCluster

REQUESTS = ['slurm.requests.one={partition="main"}', 'slurm.requests.two={partition="nograce"}']
SITE = ROOT / "slurm" / "sites" / "devcluster.toml"


def held(cluster: DevCluster, project: Path, name: str) -> tuple[Run, list[str]]:
    """Submit both requests of a run, and hold their jobs; return the run and the jobs."""
    config = Config.from_toml([CONFIGS / "sft_tiny.toml", SITE], REQUESTS)
    submission = Submission(project / ".slurm" / name, [Element(name, config, [])])
    submission.folder.mkdir(parents=True)
    (submission.folder / "code").symlink_to(ROOT)
    (run,) = submission.runs
    write_text(run.config, config.to_toml())
    run.slurm.symlink_to(submission.folder)
    write_json(submission.element_list, [str(run.path)])
    jobs = {}
    for title, script in batch_scripts(submission).items():
        request = title.rpartition(" ")[2]
        path = submission.folder / f"{request}.sh"
        stand_in = f"srun {sys.executable} -m tests.slurm.stand_in_agent {run.path}"
        write_text(path, re.sub(r"^srun .*$", stand_in, script, flags=re.MULTILINE))
        jobs[request] = cluster.ask(["sbatch", "--parsable", "--hold", str(path)]) + "_0"
    assert list(jobs) == ["one", "two"]
    record = {"executor": "slurm", "host": "", "job_id": jobs["one"], "requests": jobs, "submitted": 0.0}
    write_json(run.submission, record)
    return run, list(jobs.values())


@pytest.mark.parametrize("rounds", [1, pytest.param(25, marks=pytest.mark.faults_slow)])
def test_two_requests_that_start_together_are_one_attempt(cluster: DevCluster, tmp_path: Path, rounds: int) -> None:
    """Four runs at a time. A job whose start the other one deferred before Slurm began it does not count as started together."""
    together = 0
    for round_ in range(rounds):
        waiting = [held(cluster, tmp_path / "runs" / "project", f"{round_}-{number}") for number in range(4)]
        cluster.ask(["scontrol", "release", *(job for _, jobs in waiting for job in jobs)])
        wait_for(lambda: not cluster.ask(["squeue", "-h"]), lambda: cluster.ask(["squeue"]), 400)
        for run, jobs in waiting:
            output = "\n".join(path.read_text() for path in run.slurm.glob("*_batch.out"))
            outcome = outcome_of(run, 1)
            assert outcome, output
            assert outcome.kind == "done", output
            assert not (run.path / "two").exists(), output
            (attempt,) = read_attempts(run)
            assert attempt.job_id in jobs
            together += "goes back into the queue" in output
    assert together >= 3 * rounds, "most of them start together"
