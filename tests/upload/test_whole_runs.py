"""Whole runs on this machine whose exports and checkpoints go to S3 and to the hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import outcome_of
from tests.jobs.small_run import SMALL, finish, hpcrl, logs_of, wait_for
from tests.paths import QUICKSTART
from tests.processes import processes_of
from tests.upload.hub_server import TOKEN, Hub, hub_server
from tests.upload.s3_server import KEY, SECRET, S3Server, client, copies, s3_server


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[S3Server, Hub]]:
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    with s3_server() as s3, hub_server() as hub:
        yield s3, hub


def submitted(place: Path, name: str, s3: S3Server, hub: Hub, *settings: str) -> Run:
    (place / "credentials").write_text(f"[default]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n")
    (place / "token").write_text(TOKEN)
    client(s3).create_bucket(Bucket=f"of-{name}")
    upload = {
        "s3": "all", "s3_bucket": f"of-{name}", "s3_endpoint": s3.url, "s3_credentials_file": place / "credentials",
        "hf": "true", "hf_repo_name": "models", "hf_endpoint": hub.url, "hf_token_file": place / "token",
    }  # fmt: skip
    words = [f"trainer.run_name={name}", *SMALL, "trainer.hf_save_interval=2", *settings]
    words += [f"trainer.upload.{setting}={value}" for setting, value in upload.items()]
    done = hpcrl("submit", str(QUICKSTART), "--local", *words, cwd=place)
    assert done.returncode == 0, done.stderr
    return Run.open(place / "runs" / "quickstart" / name)


@pytest.mark.slow
def test_a_run_uploads_itself(place: Path, stores: tuple[S3Server, Hub]) -> None:
    s3, hub = stores
    run = submitted(place, "uploaded", s3, hub)
    assert finish(run, 1) == "done", logs_of(run)
    assert copies(s3, "of-uploaded") == [
        f"outputs/quickstart/uploaded/{kind}/s00000{step}" for kind in ("checkpoints", "exports") for step in (2, 4)
    ]
    assert hub.commits == [("me/models-uploaded", "uploaded: exports/s000004")]
    assert hub.repositories["me/models-uploaded"]["config.json"] == (run.export(4) / "config.json").read_bytes()
    status = hpcrl("status", "uploaded", cwd=place).stdout
    assert f"  upload hf   1 in {hub.url}/me/models-uploaded, last exports/s000004\n" in status
    assert "  upload s3   4 in s3://of-uploaded/outputs/quickstart/uploaded, last " in status


@pytest.mark.slow
@pytest.mark.parametrize("minutes", [0, 10])
def test_a_store_that_is_away_keeps_a_run_no_longer_than_it_may(
    place: Path, stores: tuple[S3Server, Hub], minutes: int
) -> None:
    """With ten minutes it is a person who wants the node back."""
    s3, hub = stores
    run = submitted(place, f"away{minutes}", s3, hub, f"slurm.upload.wait_minutes={minutes}")
    s3.failing = 10**6
    if minutes:
        wait_for(lambda: outcome_of(run, 1), lambda: logs_of(run), 240)
        assert "ending" in hpcrl("status", run.name, cwd=place).stdout
        hpcrl("cancel", run.name, cwd=place)
        wait_for(lambda: not processes_of(run), lambda: f"left over: {processes_of(run)}", 20)
    assert finish(run, 1) == "done", logs_of(run)
    assert f"{run.name}: done" in hpcrl("status", run.name, cwd=place).stdout
    s3.failing = 0
    by_hand = hpcrl("upload", run.name, "--to", "s3", cwd=place)
    assert by_hand.returncode == 0, by_hand.stderr + logs_of(run)
    assert len(copies(s3, f"of-{run.name}")) == 4
