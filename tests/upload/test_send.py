"""What is uploaded when: beside a run, by real processes, and what becomes of what cannot be. State is told by uploads/<store>.json."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config import Config
from hpcrl.config.sections.upload import UploadConfig
from hpcrl.rundir.layout import Run
from hpcrl.rundir.records import with_checksum
from hpcrl.runtime.followers import Followers
from hpcrl.upload import send
from hpcrl.upload.send import Uploader, commands, follow, job, stores_of, wanted
from hpcrl.upload.state import UploadState, upload_states
from hpcrl.upload.store import Committed, Vanished
from tests.paths import ROOT
from tests.upload.material import QUICK, end, made_run, write_checkpoint, write_export
from tests.upload.s3_server import S3Server, copies


def settings(server: S3Server, bucket: str, which: str = "all") -> list[str]:
    upload = {"s3": which, "s3_bucket": bucket, "s3_endpoint": server.url}
    return [f"trainer.upload.{name}={value}" for name, value in upload.items()]


def upload_of(run: Run) -> UploadConfig:
    return Config.from_toml([run.config]).trainer.upload


def marked(server: S3Server, bucket: str) -> list[str]:
    return [name.removeprefix("outputs/project/sorting/") for name in copies(server, bucket)]


def wait(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_what_each_store_is_to_have(run: Run) -> None:
    write_checkpoint(run, 2)
    write_checkpoint(run, 4)
    write_export(run, 2)
    write_export(run, 4)
    inside = run.checkpoint(4, 2)
    shutil.copytree(run.checkpoint(4), inside)
    every, last = UploadConfig(s3="all", s3_bucket="b"), UploadConfig(hf=True, s3="final", s3_bucket="b")

    def names(store: str, upload: UploadConfig, done: bool) -> list[str]:
        return [f"{path.parent.name}/{path.name}" for path in wanted(run, store, upload, done)]

    newest = ["exports/s000004", "checkpoints/s000004"]
    assert names("s3", every, False) == [*newest, "exports/s000002", "checkpoints/s000002"]
    assert names("s3", last, False) == names("hf", last, False) == []
    assert names("s3", last, True) == newest
    assert names("hf", last, True) == ["exports/s000004"]
    assert names("s3", UploadConfig(s3="final", s3_bucket="b", s3_checkpoints=False), True) == ["exports/s000004"]
    assert stores_of(last) == ["hf", "s3"]
    assert stores_of(UploadConfig()) == []


def test_a_process_beside_the_run_uploads_what_is_committed(
    server: S3Server, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    run = made_run(tmp_path, settings(server, bucket))
    write_export(run, 2)
    followers = Followers(run, 1, commands(run, upload_of(run)), 10)
    followers.start()
    wait(lambda: marked(server, bucket) == ["exports/s000002"])
    write_checkpoint(run, 4)
    followers.end(60)
    assert marked(server, bucket) == ["checkpoints/s000004", "exports/s000002"]
    assert [process.returncode for process in followers.processes] == [0]
    state = upload_states(run)["s3"]
    assert state.sent.keys() == {"exports/s000002", "checkpoints/s000004"}
    assert list(state.lines()) == [f"2 in s3://{bucket}/outputs/project/sorting, last checkpoints/s000004"]
    assert "checkpoints/s000004: " in run.log(1, "upload-s3").read_text()
    server.requests.clear()
    follow(run, [Uploader(run, "s3", upload_of(run), QUICK)], lambda: False)
    assert server.requests == [], "what is known to be there is not looked for"


def test_a_store_that_is_away_holds_nothing_up_and_gets_it_later(
    server: S3Server, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    run = made_run(tmp_path, settings(server, bucket))
    write_export(run, 2)
    server.failing = 10**6
    followers = Followers(run, 1, commands(run, upload_of(run)))
    followers.start()
    wait(lambda: server.requests)
    began = time.monotonic()
    followers.end(0.5)
    assert time.monotonic() - began < 10
    assert followers.processes[0].returncode == -9
    server.failing = 0
    with pytest.raises(SystemExit) as ended:
        job(str(run.path), 10)
    assert ended.value.code == 0
    assert marked(server, bucket) == ["exports/s000002"]


def test_final_copies_are_made_of_a_run_that_is_done(server: S3Server, bucket: str, tmp_path: Path) -> None:
    run = made_run(tmp_path, settings(server, bucket, "final"))
    write_export(run, 2)
    write_export(run, 4)
    uploader = Uploader(run, "s3", upload_of(run), QUICK)
    assert follow(run, [uploader], lambda: False)
    assert marked(server, bucket) == []
    end(run)
    assert follow(run, [uploader], lambda: False)
    assert marked(server, bucket) == ["exports/s000004"]


def test_what_fails_is_told_and_tried_again_and_keeps_nothing_else_back(
    server: S3Server, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(send, "_AGAIN_S", 600.0)
    run = made_run(tmp_path, settings(server, bucket))
    write_export(run, 2)
    broken = write_checkpoint(run, 4) / "policy" / "__0_0.distcp"
    content = broken.read_bytes()
    broken.write_bytes(content[::-1])
    uploader = Uploader(run, "s3", upload_of(run), QUICK)
    left = iter([True, False])
    assert follow(run, [uploader], lambda: next(left))
    assert marked(server, bucket) == ["exports/s000002"]
    assert "checksum differs from the manifest" in uploader.failed["checkpoints/s000004"]
    assert "checkpoints/s000004: CommitError: " in capsys.readouterr().out
    assert any("checkpoints/s000004 failed: " in line for line in UploadState.read(run.upload("s3")).lines())
    broken.write_bytes(content)
    uploader.try_again()
    uploader.send_due(done=False)
    assert marked(server, bucket) == ["checkpoints/s000004", "exports/s000002"]
    assert uploader.failed == {}


def test_an_outage_at_the_end_is_waited_for_as_long_as_asked(
    server: S3Server, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(send, "_EVERY_S", 0.05)
    monkeypatch.setattr(send, "_AGAIN_S", 0.01)
    run = made_run(tmp_path, settings(server, bucket))
    write_export(run, 2)
    server.failing = 10**6
    uploader = Uploader(run, "s3", upload_of(run), QUICK)
    assert not follow(run, [uploader], lambda: False, patience_s=0.3)
    assert "503 SlowDown" in uploader.failed["exports/s000002"]
    server.failing = 12  # more than one upload asks before it is given up for a while
    assert follow(run, [uploader], lambda: False)
    assert marked(server, bucket) == ["exports/s000002"]


def test_what_the_run_deletes_is_given_up_and_no_failure(server: S3Server, bucket: str, tmp_path: Path) -> None:
    run = made_run(tmp_path, settings(server, bucket))
    checkpoint = write_checkpoint(run, 4)
    uploader = Uploader(run, "s3", upload_of(run), QUICK)
    shutil.move(checkpoint, tmp_path / "aside")
    with pytest.raises(Vanished):
        uploader.send(checkpoint)
    assert uploader.failed == {}
    (line,) = upload_states(run)["s3"].lines()
    assert line.startswith("checkpoints/s000004 given up: ")
    assert not list(run.uploads.glob(".*")), "its state is written as a whole"


def test_what_failed_and_is_deleted_then_is_waited_for_no_more(server: S3Server, bucket: str, tmp_path: Path) -> None:
    run = made_run(tmp_path, settings(server, bucket))
    checkpoint = write_checkpoint(run, 2)
    write_checkpoint(run, 4)
    uploader = Uploader(run, "s3", upload_of(run), QUICK)
    server.failing = 10**6
    uploader.send_due(done=False)
    assert uploader.away == uploader.failed.keys() == {"checkpoints/s000002", "checkpoints/s000004"}
    server.failing = 0
    shutil.rmtree(checkpoint)
    assert follow(run, [uploader], lambda: False)
    assert marked(server, bucket) == ["checkpoints/s000004"]
    assert uploader.failed == {}
    assert "deleted by its run before it could be sent" in upload_states(run)["s3"].given_up["checkpoints/s000002"]


def test_another_bucket_gets_everything_again(server: S3Server, bucket: str, tmp_path: Path) -> None:
    run = made_run(tmp_path, settings(server, bucket))
    write_export(run, 2)
    upload = upload_of(run)
    follow(run, [Uploader(run, "s3", upload, QUICK)], lambda: False)
    follow(run, [Uploader(run, "s3", replace(upload, s3_prefix="models"), QUICK)], lambda: False)
    assert copies(server, bucket) == [f"{prefix}/project/sorting/exports/s000002" for prefix in ("models", "outputs")]


def test_secrets_stay_out_of_state_and_logs(
    server: S3Server, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    secret = "wJalrXUtnFEMI"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "other-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    run = made_run(tmp_path, settings(server, bucket))
    write_export(run, 2)
    followers = Followers(run, 1, commands(run, upload_of(run)))
    followers.start()
    followers.end(60)
    assert "InvalidAccessKeyId" in run.log(1, "upload-s3").read_text()
    assert "InvalidAccessKeyId" in upload_states(run)["s3"].failed["exports/s000002"]
    assert not any(secret in path.read_text(errors="replace") for path in run.path.rglob("*") if path.is_file())
    assert all(secret not in word for words in commands(run, upload_of(run)).values() for word in words)


def test_a_state_that_cannot_be_read_is_as_none(run: Run) -> None:
    run.uploads.mkdir()
    UploadState(place="there", failed={"exports/s000002": "no"}).write(run.upload("s3"))
    assert upload_states(run)["s3"].place == "there"
    for content in ("{", run.upload("s3").read_text().replace("there", "where"), '{"sent": 5}'):
        run.upload("s3").write_text(content)
        assert upload_states(run) == {"s3": UploadState()}
    assert Committed.read(write_export(run, 2)).name == "exports/s000002"


@pytest.mark.parametrize(
    "wrong",
    [
        {"sent": "x"}, {"sent": {"a": 1}}, {"sent": {"a": {"mark": "m", "bytes": 1}}}, {"now": 1}, {"failed": [1]}, {"given_up": {"a": 1}},
        {"sent": {"a": {"mark": "m", "bytes": True, "time": 1.0}}},
        {"sent": {"a": {"mark": "m", "bytes": 1, "time": math.nan}}}, {"now": {"name": "a", "bytes": "1", "total": 2, "time": 3.0}},
    ],
    ids=str,
)  # fmt: skip
def test_a_strangers_state_of_other_types_is_as_none(run: Run, wrong: dict[str, Any]) -> None:
    """Its checksum is right, and `hpcrl status` reads it with all other runs below a shared root."""
    run.uploads.mkdir()
    run.upload("s3").write_text(with_checksum({**asdict(UploadState()), **wrong})[0])
    assert upload_states(run) == {"s3": UploadState()}
