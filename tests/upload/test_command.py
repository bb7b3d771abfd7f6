"""`hpcrl upload` and `hpcrl status` as a user types them, and what `hpcrl submit` finds missing."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.cli.main import main
from hpcrl.config import Config
from hpcrl.launch.submit.executors import Element, Submission, batch_scripts
from hpcrl.launch.submit.uploads import check_uploads, missing_secrets
from hpcrl.rundir.commit import write_json
from hpcrl.rundir.layout import Run
from tests.paths import QUICKSTART
from tests.upload.hub_server import Hub
from tests.upload.material import EXPORTS, end, made_run, write_checkpoint, write_export
from tests.upload.s3_server import S3Server, copies

S3 = [*EXPORTS, "trainer.upload.s3=final", "trainer.upload.s3_bucket=mine"]
HF = [*EXPORTS, "trainer.upload.hf=true", "trainer.upload.hf_repo_name=me/model"]


def local(run: Run, pid: int) -> Run:
    record = {"executor": "local", "host": socket.gethostname(), "job_id": str(pid), "overrides": [], "submitted": 1.0}
    write_json(run.submission, record)
    return run


@pytest.fixture
def ended(tmp_path: Path) -> Run:
    """A run without settings of uploads that is done."""
    run = local(made_run(tmp_path, []), 1 << 22)
    for step in (2, 4):
        write_export(run, step)
        write_checkpoint(run, step)
    end(run)
    return run


def test_a_run_that_is_over_is_uploaded_by_hand(
    ended: Run, server: S3Server, bucket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["upload", str(ended.path), "--to", "s3", "--bucket", bucket, "--endpoint", server.url]
    command += ["--prefix", "models/mine"]
    assert main(command) == 0
    assert copies(server, bucket) == ["models/mine/project/sorting/exports/s000004"]
    said = capsys.readouterr().out
    assert said.startswith("exports/s000004: ")
    assert said.endswith(f"in s3://{bucket}/models/mine/project/sorting\n")
    assert main(command) == 0
    assert "exports/s000004: there already" in capsys.readouterr().out
    assert main([*command, "--step", "2", "--checkpoints"]) == 0
    names = ["checkpoints/s000002", "exports/s000002", "exports/s000004"]
    assert copies(server, bucket) == [f"models/mine/project/sorting/{name}" for name in names]
    assert main(["status", str(ended.path)]) == 0
    assert "  upload s3   3 in s3://" in capsys.readouterr().out
    assert main(["status", str(ended.path), "--json"]) == 0
    (state,) = json.loads(capsys.readouterr().out)
    assert sorted(state["uploads"]["s3"]["sent"]) == names


def test_the_newest_export_goes_to_the_hub(ended: Run, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["upload", str(ended.path), "--to", "hf", "--repo", "lab/models", "--endpoint", hub.url]
    assert main(command) == 0
    assert hub.commits == [("lab/models-sorting", "sorting: exports/s000004")]
    assert capsys.readouterr().out.endswith(f"in {hub.url}/lab/models-sorting\n")


def test_watching_sends_what_the_settings_name_and_ends_with_the_run(
    server: S3Server, bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = local(made_run(tmp_path, ["trainer.upload.s3=all", f"trainer.upload.s3_bucket={bucket}"]), 1 << 22)
    write_export(run, 2)
    write_checkpoint(run, 2)
    end(run)
    assert main(["upload", str(run.path), "--watch", "--no-checkpoints", "--endpoint", server.url]) == 0
    assert copies(server, bucket) == ["outputs/project/sorting/exports/s000002"]
    assert (
        main(["upload", str(run.path), "--watch", "--to", "s3", "--bucket", "none-such", "--endpoint", server.url]) == 5
    )
    assert "s3: checkpoints/s000002: s3://none-such/" in capsys.readouterr().err


def test_what_cannot_be_uploaded_is_told_with_its_remedy(
    ended: Run, server: S3Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*words: str, run: Run = ended, code: int = 5) -> str:
        assert main(["upload", str(run.path), *words]) == code
        return capsys.readouterr().err

    assert "give --to hf with --repo, or --to s3 with --bucket" in refused()
    assert "no bucket is named; set trainer.upload.s3_bucket, or give --bucket" in refused("--to", "s3")
    assert "no repository is named" in refused("--to", "hf")
    assert "without s3://, found 's3://mine'" in refused("--to", "s3", "--bucket", "s3://mine", code=2)
    assert "no export of step 3; `hpcrl checkpoint export sorting`" in refused("--to", "hf", "--step", "3")
    missing = refused("--to", "s3", "--bucket", "none-such", "--endpoint", server.url, code=9)
    assert "s3://none-such/outputs/project/sorting: list_objects_v2: 404 NoSuchBucket" in missing
    with subprocess.Popen([sys.executable, "-c", "input()", "as submitit"], stdin=subprocess.PIPE) as process:
        running = local(made_run(tmp_path, S3, "running"), process.pid)
        assert "running is not over, and uploads to s3 itself" in refused(run=running)
        process.communicate(b"\n")
    monkeypatch.setitem(sys.modules, "boto3.session", None)
    assert "uploads to S3 need boto3.session: pip install 'hpcrl[s3]'" in refused("--to", "s3", "--bucket", "mine")


def loaded(*settings: str) -> Config:
    return Config.from_toml([QUICKSTART], list(settings))


def test_submit_finds_files_and_packages_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def problems(*settings: str) -> list[tuple[str, str]]:
        return [(one.path, one.message) for one in check_uploads(loaded(*settings))]

    none, command = tmp_path / "none", "slurm.upload.by=command"
    for path, words in (("hf_token_file", HF), ("s3_credentials_file", S3)):
        ((where, message),) = problems(*words, f"trainer.upload.{path}={none}")
        assert where == f"trainer.upload.{path}"
        assert message == f"no file {none} that you can read; see docs/uploads.md#secrets"
        assert problems(*words, f"trainer.upload.{path}={QUICKSTART}") == []
        assert problems(*words, f"trainer.upload.{path}={none}", command) == []
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(none))
    assert problems(*HF) == []
    assert [where for where, _ in problems(*S3)] == ["trainer.upload.s3: $AWS_SHARED_CREDENTIALS_FILE"]
    monkeypatch.delenv("AWS_SHARED_CREDENTIALS_FILE")
    monkeypatch.setitem(sys.modules, "boto3", None)
    found = dict(problems(*S3))
    assert found["trainer.upload.s3"] == """needs boto3: pip install 'hpcrl[s3]', or set slurm.upload.by="command\""""


def test_submit_warns_where_it_sees_no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("AWS_", "HF_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert [text.partition(":")[0] for text in missing_secrets(loaded(*HF, *S3))] == [
        "trainer.upload.hf", "trainer.upload.s3",
    ]  # fmt: skip
    for name in ("AWS_PROFILE", "HF_TOKEN", "HF_HOME", "HF_TOKEN_PATH"):
        monkeypatch.setenv(name, "")
    assert len(missing_secrets(loaded(*HF, *S3))) == 2, "what is empty is not set"
    assert missing_secrets(loaded(*HF, *S3, "slurm.upload.by=command")) == missing_secrets(loaded()) == []
    monkeypatch.setenv("AWS_PROFILE", "lab")
    token = tmp_path / ".cache" / "huggingface" / "token"
    token.parent.mkdir(parents=True)
    token.write_text("hf_x")
    assert missing_secrets(loaded(*HF, *S3)) == []


def test_the_job_of_an_upload_waits_for_the_run_in_its_own_partition(tmp_path: Path) -> None:
    of_job = ["slurm.upload.by=job", "slurm.upload.partition=datamover", "slurm.upload.extra={nice=5}"]

    def scripts(*settings: str) -> dict[str, str]:
        config = loaded(*S3, "slurm.partition=gpu", "slurm.account=lab", *settings)
        return batch_scripts(Submission(tmp_path / ".slurm" / "mine", [Element("mine", config, [])]))

    assert list(scripts()) == ["batch script"]
    script = scripts(*of_job)["batch script of the upload"]
    for line in ("partition=datamover", "account=lab", "dependency=afterany:JOB_0", "time=240", "nice=5", "requeue"):
        assert f"#SBATCH --{line}\n" in script, script
    assert "gres" not in script
    assert "gpus" not in script
    assert "#SBATCH --partition=gpu\n" in scripts(of_job[0])["batch script of the upload"]
