"""Copies in S3: whole, right, resumed, and never complete by mistake. The server is moto's, the client boto3."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config.sections.upload import UploadConfig
from hpcrl.errors import CommitError
from hpcrl.rundir.commit import COMMIT, MANIFEST, verify
from hpcrl.rundir.layout import Run
from hpcrl.upload.s3 import S3Store
from hpcrl.upload.store import Away, Committed, Patience, UploadRefused, Vanished
from tests.paths import ROOT
from tests.upload.material import ODD_NAMES, QUICK, write_checkpoint, write_export, write_files
from tests.upload.s3_server import KEY, SECRET, S3Server, client, keys

MIB = 1 << 20


def store(run: Run, server: S3Server, bucket: str, patience: Patience = QUICK, **settings: Any) -> S3Store:
    upload = UploadConfig(s3="all", s3_bucket=bucket, s3_endpoint=server.url, **settings)
    return S3Store(run, upload, patience, part_bytes=5 * MIB)


def send(one: S3Store, path: Path) -> tuple[int, int]:
    """Send a directory; return the bytes that were sent, and those that were told of."""
    told = list[int]()
    return one.send(Committed.read(path), told.append), sum(told)


def test_what_was_committed_is_there_and_is_not_sent_again(
    run: Run, server: S3Server, bucket: str, tmp_path: Path
) -> None:
    export, checkpoint = write_export(run, 4), write_checkpoint(run, 4, size=11 * MIB)
    one = store(run, server, bucket)
    for path in (export, checkpoint):
        total = sum(Committed.read(path).files.values())
        assert send(one, path) == (total, total)
        order = server.puts()
        assert COMMIT in order[-1]
        assert "manifest.json" in order[-2]
        assert send(one, path) == (0, total)
        assert server.puts() == []
    found = keys(server, bucket)
    for name, content in found.items():
        assert name.startswith("outputs/project/sorting/")
        copied = tmp_path / "back" / name
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_bytes(content)
    for path in (export, checkpoint):
        assert verify(tmp_path / "back/outputs/project/sorting" / path.parent.name / path.name) == verify(path)
    assert one.place == f"s3://{bucket}/outputs/project/sorting"


def test_odd_names_of_files_arrive_as_they_are(run: Run, server: S3Server, bucket: str) -> None:
    export, one = write_files(run, 4, *ODD_NAMES), store(run, server, bucket)
    send(one, export)
    prefix, found = "outputs/project/sorting/exports/s000004/", keys(server, bucket)
    assert found.keys() == {prefix + name for name in (*ODD_NAMES, COMMIT, MANIFEST)}
    assert all(found[prefix + name] == name.encode() for name in ODD_NAMES)
    assert send(one, export)[0] == 0
    with pytest.raises(UploadRefused, match="404"):  # moto has no keys with line breaks
        send(one, write_files(run, 12, "a\nb"))


def test_after_a_kill_the_rest_is_sent_and_nothing_looked_complete(run: Run, server: S3Server, bucket: str) -> None:
    checkpoint, prefix = write_checkpoint(run, 4, size=16 * MIB), "outputs/project/sorting/checkpoints/s000004/"
    code = f"""
from pathlib import Path
from hpcrl.config.sections.trainer import UploadConfig
from hpcrl.rundir.layout import Run
from hpcrl.upload import s3
from hpcrl.upload.store import Committed, Patience
s3._AT_ONCE = 1
upload = UploadConfig(s3="all", s3_bucket={bucket!r}, s3_endpoint={server.url!r})
store = s3.S3Store(Run(Path({str(run.path)!r})), upload, Patience(), part_bytes={5 * MIB})
store.send(Committed.read(Path({str(checkpoint)!r})), lambda _: None)
"""
    environment = os.environ | {"HPCRL_FAULT": "upload.part@2:kill", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=False, timeout=60)
    assert done.returncode == -9
    assert prefix + COMMIT not in keys(server, bucket)
    server.puts()
    send(store(run, server, bucket), checkpoint)
    assert sum("partNumber" in path for path in server.puts()) == 2
    assert keys(server, bucket)[prefix + "policy/__0_0.distcp"] == (checkpoint / "policy/__0_0.distcp").read_bytes()
    assert prefix + COMMIT in keys(server, bucket)
    assert "Uploads" not in client(server).list_multipart_uploads(Bucket=bucket)


def test_a_server_that_fails_three_times_is_asked_again(run: Run, server: S3Server, bucket: str) -> None:
    export = write_export(run, 4)
    server.failing = 3
    assert send(store(run, server, bucket, Patience(0.001, total_s=5)), export)[0] > 0
    server.failing = 10**6
    with pytest.raises(Away, match=f"s3://{bucket}/outputs/project/sorting: list_objects_v2: 503 SlowDown"):
        send(store(run, server, bucket), export)


@pytest.mark.parametrize("name", ["model-00001-of-00001.safetensors", "policy/__0_0.distcp"])
def test_what_arrives_damaged_is_found_and_sent_again(run: Run, server: S3Server, bucket: str, name: str) -> None:
    path = write_export(run, 4) if name.startswith("model") else write_checkpoint(run, 4, size=11 * MIB)
    server.damages = name
    with pytest.raises(Away, match=f"{name} arrived damaged"):
        send(store(run, server, bucket), path)
    prefix = f"outputs/project/sorting/{path.parent.name}/{path.name}/"
    assert not {prefix + name, prefix + COMMIT} & keys(server, bucket).keys()
    assert send(store(run, server, bucket), path)[0] > 0
    assert keys(server, bucket)[prefix + name] == (path / name).read_bytes()


def test_what_was_damaged_in_the_store_is_found_and_replaced(run: Run, server: S3Server, bucket: str) -> None:
    export, one = write_export(run, 4), store(run, server, bucket)
    send(one, export)
    key = "outputs/project/sorting/exports/s000004/config.json"
    right = keys(server, bucket)[key]
    client(server).put_object(Bucket=bucket, Key=key, Body=right[::-1])
    assert send(one, export)[0] == len(right)
    assert keys(server, bucket)[key] == right


def test_an_export_that_was_made_anew_takes_the_place_of_the_old_one(run: Run, server: S3Server, bucket: str) -> None:
    one = store(run, server, bucket)
    send(one, write_export(run, 4))
    export = write_export(run, 4, attempt=2)
    server.requests.clear()
    assert send(one, export)[0] > 3000
    marks = [method for method, path in server.requests if COMMIT in path and method != "HEAD"]
    assert marks == ["DELETE", "PUT"], "while the files are exchanged, the copy is not complete"


def test_what_the_run_deletes_meanwhile_is_given_up_and_leaves_nothing(run: Run, server: S3Server, bucket: str) -> None:
    checkpoint, one = write_checkpoint(run, 4, size=16 * MIB), store(run, server, bucket)
    directory, seen = Committed.read(checkpoint), threading.Event()

    def sent(_: int) -> None:
        if not seen.is_set():
            seen.set()
            shutil.rmtree(checkpoint)

    with pytest.raises(Vanished, match=r"deleted or written again by its run"):
        one.send(directory, sent)
    assert keys(server, bucket) == {}
    assert "Uploads" not in client(server).list_multipart_uploads(Bucket=bucket)


def test_a_copy_that_is_complete_stays_when_the_run_deletes_its_own(run: Run, server: S3Server, bucket: str) -> None:
    checkpoint, one = write_checkpoint(run, 4), store(run, server, bucket)
    send(one, checkpoint)
    directory, before = Committed.read(checkpoint), keys(server, bucket)
    with pytest.raises(Vanished):
        one.send(directory, lambda _: shutil.rmtree(checkpoint, ignore_errors=True))
    assert keys(server, bucket) == before


def test_what_is_damaged_here_is_not_sent(run: Run, server: S3Server, bucket: str) -> None:
    checkpoint = write_checkpoint(run, 4)
    file = checkpoint / "policy" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[::-1])
    with pytest.raises(CommitError, match=r"checksum differs from the manifest"):
        send(store(run, server, bucket), checkpoint)
    assert not any(COMMIT in key for key in keys(server, bucket))


def test_errors_name_the_bucket_and_the_remedy(
    run: Run, server: S3Server, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = write_export(run, 4)
    with pytest.raises(UploadRefused, match=r"s3://no-such-bucket/.* 404 NoSuchBucket.*create the bucket"):
        send(store(run, server, "no-such-bucket"), export)
    with pytest.raises(UploadRefused, match=r"s3_credentials_file: no file"):
        store(run, server, bucket, s3_credentials_file=str(tmp_path / "none"))
    wrong = tmp_path / "wrong"
    wrong.write_text("[default]\naws_access_key_id = other\naws_secret_access_key = very-secret\n")
    with pytest.raises(
        UploadRefused, match=f"s3://{bucket}/.* 403 InvalidAccessKeyId.*look at the credentials"
    ) as refused:
        send(store(run, server, bucket, s3_credentials_file=str(wrong)), export)
    assert "very-secret" not in str(refused.value)
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        monkeypatch.delenv(f"AWS_{name}")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(UploadRefused, match=r"locate credentials.*docs/uploads.md#secrets"):
        send(store(run, server, bucket), export)
    right = tmp_path / "right"
    right.write_text(f"[default]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n")
    assert send(store(run, server, bucket, s3_credentials_file=str(right)), export)[0] > 0
    unreachable = UploadConfig(
        s3="all", s3_bucket=bucket, s3_endpoint="http://127.0.0.1:9", s3_credentials_file=str(right)
    )
    with pytest.raises(Away, match=r"Could not connect"):
        send(S3Store(run, unreachable, QUICK), export)
