"""A run whose exports and checkpoints are uploaded by a job of its own, on a real Slurm."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.rundir.commit import committed
from hpcrl.rundir.layout import Run, step_of
from hpcrl.rundir.ledger import read_attempts
from hpcrl.upload.state import upload_states
from tests.jobs.small_run import HPCRL, SMALL, logs_of, wait_for
from tests.paths import QUICKSTART, ROOT
from tests.slurm.conftest import DevCluster
from tests.slurm.test_runs import SITE, ask, finish
from tests.upload.s3_server import KEY, SECRET


@pytest.mark.faults_slow
def test_a_job_uploads_what_the_run_has_left(cluster: DevCluster, tmp_path: Path) -> None:
    secrets = tmp_path / "credentials"
    secrets.write_text(f"[default]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n")
    serve = cluster.argv("run", sys.executable, "-m", "tests.upload.s3_server", "10.77.0.1", "of-jobs")
    with subprocess.Popen(serve, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        url = server.stdout.readline().strip()
        upload = {"s3": "all", "s3_bucket": "of-jobs", "s3_endpoint": url, "s3_credentials_file": secrets}
        settings = [
            *("trainer.run_name=uploaded", *SMALL, "trainer.eval_interval=0"),
            *("trainer.max_steps=12", "trainer.hf_save_interval=12", "trainer.max_ckpts_to_keep=2"),
            *(f"trainer.upload.{name}={value}" for name, value in upload.items()),
            *("slurm.upload.by=job", "slurm.upload.partition=high", "slurm.upload.time_minutes=5"),
        ]
        done = cluster.run([HPCRL, "submit", str(QUICKSTART), SITE, *settings], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        run = Run.open(tmp_path / "runs" / "quickstart" / "uploaded")
        job = json.loads(run.submission.read_text())["upload"]

        def shown() -> str:
            return cluster.ask(["scontrol", "show", "job", "-o", job])

        assert "Partition=high" in shown()
        wait_for(lambda: committed(run.checkpoints, step_of), lambda: logs_of(run), 240)
        ask(cluster, tmp_path, "requeue", "uploaded")
        wait_for(lambda: len(read_attempts(run)) == 2, lambda: logs_of(run), 120)
        assert "JobState=PENDING" in shown(), "the run's job has not ended for good"
        assert finish(cluster, tmp_path, run, 2) == "done", logs_of(run)
        wait_for(
            lambda: "JobState=COMPLETED" in shown(),
            lambda: "\n".join(path.read_text() for path in run.slurm.glob(f"{job.partition('_')[0]}*.out")),
            120,
        )
        sent = ["checkpoints/s000010", "checkpoints/s000012", "exports/s000012"]
        assert sorted(upload_states(run)["s3"].sent) == sent
        assert "  upload s3   3 in s3://of-jobs/" in ask(cluster, tmp_path, "status", "uploaded")
        again = cluster.run([HPCRL, "upload", "uploaded"], cwd=tmp_path)
        assert again.stdout.count("there already") == len(sent), again.stderr


@pytest.mark.faults_slow
def test_a_job_that_would_upload_nothing_goes_with_its_run(cluster: DevCluster, tmp_path: Path) -> None:
    secrets = tmp_path / "credentials"
    secrets.write_text(f"[default]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n")
    upload = {"s3": "all", "s3_bucket": "of-jobs", "s3_endpoint": "http://10.77.0.1:1", "s3_credentials_file": secrets}
    settings = [
        *("trainer.run_name=waits", *SMALL, "slurm.upload.by=job", "slurm.extra.begin=now+1hour"),
        *(f"trainer.upload.{name}={value}" for name, value in upload.items()),
    ]
    done = cluster.run([HPCRL, "submit", str(QUICKSTART), SITE, *settings], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(cluster.ask(["squeue", "-h", "-o", "%i"]).split()) == 2
    assert "waits: cancelled" in ask(cluster, tmp_path, "cancel", "waits")
    assert not cluster.ask(["squeue", "-h"])
