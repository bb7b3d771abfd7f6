"""Whole runs on this machine whose exports and checkpoints go to S3 and to the hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.rundir.layout import Run
from tests.jobs.small_run import SMALL, finish, hpcrl, logs_of
from tests.paths import QUICKSTART
from tests.upload.hub_server import TOKEN, hub_server
from tests.upload.s3_server import KEY, SECRET, client, copies, s3_server


@pytest.mark.slow
def test_a_run_uploads_itself_and_a_store_that_is_away_keeps_nothing(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = place / "credentials"
    secrets.write_text(f"[default]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n")
    (place / "token").write_text(TOKEN)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    with s3_server() as s3, hub_server() as hub:
        client(s3).create_bucket(Bucket="whole-runs")
        upload = {
            "s3": "all", "s3_bucket": "whole-runs", "s3_endpoint": s3.url, "s3_credentials_file": secrets,
            "hf": "true", "hf_repo_name": "models", "hf_endpoint": hub.url, "hf_token_file": place / "token",
        }  # fmt: skip
        settings = [
            *SMALL,
            "trainer.hf_save_interval=2",
            *(f"trainer.upload.{name}={value}" for name, value in upload.items()),
        ]

        def submitted(name: str, *more: str) -> Run:
            done = hpcrl("submit", str(QUICKSTART), "--local", f"trainer.run_name={name}", *settings, *more, cwd=place)
            assert done.returncode == 0, done.stderr
            run = Run.open(place / "runs" / "quickstart" / name)
            assert finish(run, 1) == "done", logs_of(run)
            return run

        run = submitted("uploaded")
        assert copies(s3, "whole-runs") == [
            f"outputs/quickstart/uploaded/{kind}/s00000{step}" for kind in ("checkpoints", "exports") for step in (2, 4)
        ]
        assert hub.commits == [("me/models-uploaded", "uploaded: exports/s000004")]
        assert hub.repositories["me/models-uploaded"]["config.json"] == (run.export(4) / "config.json").read_bytes()
        status = hpcrl("status", "uploaded", cwd=place).stdout
        assert f"  upload hf   1 in {hub.url}/me/models-uploaded, last exports/s000004\n" in status
        assert "  upload s3   4 in s3://whole-runs/outputs/quickstart/uploaded, last " in status

        s3.failing = 10**6
        away = submitted("away", "slurm.upload.wait_minutes=0")
        assert "away: done" in hpcrl("status", "away", cwd=place).stdout
        s3.failing = 0
        by_hand = hpcrl("upload", "away", "--to", "s3", cwd=place)
        assert by_hand.returncode == 0, by_hand.stderr + logs_of(away)
        assert len(copies(s3, "whole-runs")) == 8
