"""A directory is complete or absent, whatever line its writer was killed at."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hpcrl.errors import CommitError, RunError
from hpcrl.rundir import commit
from hpcrl.rundir.checkpoints import newest_usable
from hpcrl.rundir.layout import Run, step_of
from hpcrl.rundir.ledger import (
    cancel_outcome,
    find_attempt,
    open_attempt,
    outcome_of,
    read_attempts,
    read_outcomes,
    report_outcome,
)
from hpcrl.upload.store import Committed


def make(target: Path, attempt: int = 1, text: str = "weights") -> None:
    with commit.committed_directory(target, attempt, step=1) as directory:
        (directory / "sub").mkdir()
        (directory / "sub" / "a").write_text(text)


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    return Run(tmp_path).checkpoints


def newest(parent: Path) -> tuple[Path | None, list[str]]:
    said: list[str] = []
    return newest_usable(Run(parent.parent), 1, said.append), said


def test_committed_directory_verifies(parent: Path) -> None:
    make(parent / "s000001")
    assert commit.verify(parent / "s000001")["step"] == 1
    assert commit.committed(parent, step_of) == [1]
    assert not list(parent.glob(".tmp-*"))


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: (d / "sub" / "a").write_text("weightz"),
        lambda d: (d / "sub" / "a").write_text("w"),
        lambda d: (d / "sub" / "a").unlink(),
        lambda d: (d / commit.MANIFEST).write_text((d / commit.MANIFEST).read_text() + " "),
        lambda d: (d / commit.MANIFEST).unlink(),
        lambda d: (d / commit.COMMIT).unlink(),
    ],
    ids=["flipped", "truncated", "missing", "manifest changed", "no manifest", "no mark"],
)
def test_damage_is_seen_and_the_older_one_is_used(parent: Path, damage: object) -> None:
    make(parent / "s000001")
    make(parent / "s000002")
    damage(parent / "s000002")  # type: ignore[operator]
    with pytest.raises(CommitError, match="s000002"):
        commit.verify(parent / "s000002")
    found, said = newest(parent)
    assert found == parent / "s000001"
    assert len(said) == 1


def rewrite(path: Path, text: str) -> None:
    """Give a committed directory another manifest, with a mark that fits."""
    (path / commit.MANIFEST).write_text(text)
    mark = {"attempt": 1, "manifest": commit.digest_of(text.encode())}
    (path / commit.COMMIT).write_text(json.dumps(mark))


@pytest.mark.parametrize(
    "name", ["COMMIT", "manifest.json", "./weights", "sub//weights", "weights/", "", ".", "\ud800"]
)
def test_a_manifest_lists_each_file_by_one_name_without_the_mark(parent: Path, name: str) -> None:
    make(parent / "s000001")
    path = parent / "s000001"
    manifest = json.loads((path / commit.MANIFEST).read_text())
    size = (path / commit.COMMIT).stat().st_size  # which a manifest can know
    manifest["files"][name] = {"size": size}
    rewrite(path, json.dumps(manifest))
    for read in (commit.verify, Committed.read):
        with pytest.raises(CommitError, match=r"manifest.json names '.*'; expected files below .*s000001"):
            read(path)


@pytest.mark.parametrize(
    "name", ["../../private", "{}/private", "sub/../../../private", "link", "linked/private", "\0"]
)
def test_names_of_a_manifest_stay_in_its_directory(parent: Path, name: str) -> None:
    make(parent / "s000001")
    path, private = parent / "s000001", parent.parent / "private"
    private.write_text("weights")
    (path / "link").symlink_to(private)
    (path / "linked").symlink_to(private.parent)
    manifest = json.loads((path / commit.MANIFEST).read_text())
    manifest["files"][name.format(private.parent)] = {"size": len("weights")}
    rewrite(path, json.dumps(manifest))
    for read in (commit.verify, Committed.read):
        with pytest.raises(CommitError, match=r"manifest.json names .*; expected files below .*s000001"):
            read(path)


def test_a_directory_that_was_moved_and_linked_is_still_read(parent: Path, tmp_path: Path) -> None:
    make(parent / "s000001")
    (parent / "s000001").rename(tmp_path / "moved")
    (parent / "s000001").symlink_to(tmp_path / "moved")
    assert commit.verify(parent / "s000001")["step"] == 1


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "[]", '{"attempt": 1}', '{"attempt": 1, "files": []}', '{"attempt": 1, "files": {"a": {}}}']
)
def test_a_manifest_of_another_shape(parent: Path, text: str) -> None:
    make(parent / "s000001")
    rewrite(parent / "s000001", text)
    with pytest.raises(CommitError, match=r"manifest.json is no manifest: expected attempt"):
        commit.verify(parent / "s000001")


def test_files_are_hashed_at_the_same_time(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with commit.committed_directory(parent / "s000001", 1) as directory:
        for name in "abcd":
            (directory / name).write_text(name)
    together, real = threading.Barrier(4), commit.checksum

    def checksum(path: Path) -> str:
        together.wait(60)  # raises where the others are not hashed meanwhile
        return real(path)

    monkeypatch.setattr(commit, "checksum", checksum)
    assert len(commit.verify(parent / "s000001")["files"]) == 4


def test_a_file_larger_than_what_is_read_at_once(tmp_path: Path) -> None:
    content = bytes(range(256)) * 10_000
    (tmp_path / "file").write_bytes(content)
    assert commit.checksum(tmp_path / "file") == commit.digest_of(content)


def test_records_are_bounded_and_data_is_not(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(5))
    with pytest.raises(OSError, match="larger than"):
        commit.read_bytes(path, most=4)
    assert commit.read_bytes(path, most=None) == bytes(5)
    os.truncate(path, commit.LARGEST_RECORD + 1)
    with pytest.raises(OSError, match="larger than 1 GiB"):
        commit.read_bytes(path)


def test_exception_in_the_middle_leaves_nothing_visible(parent: Path) -> None:
    def write_and_fail() -> None:
        with commit.committed_directory(parent / "s000001", 1) as directory:
            (directory / "a").write_text("x")
            (directory / "missing").read_text()

    with pytest.raises(FileNotFoundError):
        write_and_fail()
    assert newest(parent) == (None, [])


KILLER = """
import os, signal, sys
from pathlib import Path
from hpcrl.rundir import commit
at, seen, real = int(sys.argv[2]), 0, {}
def counted(name):
    def call(*a, **k):
        global seen
        seen += 1
        if seen == at: os.kill(os.getpid(), signal.SIGKILL)
        return real[name](*a, **k)
    return call
for name in ("fsync", "rename", "replace", "open"):
    real[name] = getattr(os, name)
    setattr(os, name, counted(name))
with commit.committed_directory(Path(sys.argv[1]), 2, step=2) as directory:
    (directory / "a").write_text("new")
print("finished")
"""


def test_killed_at_every_system_call_of_the_protocol(tmp_path: Path) -> None:
    """SIGKILL before each fsync, rename, replace and open in turn: the old commit stays, the new one is whole or absent."""
    for at in range(1, 100):
        parent = Run(tmp_path / str(at)).checkpoints
        make(parent / "s000001", text="old")
        done = subprocess.run(
            [sys.executable, "-c", KILLER, str(parent / "s000002"), str(at)],
            capture_output=True,
            text=True,
            check=False,
        )
        found, _ = newest(parent)
        if done.returncode == 0:
            assert at > 8, "the protocol has fewer steps than expected"
            assert found == parent / "s000002"
            return
        assert done.returncode == -signal.SIGKILL
        assert found in (parent / "s000001", parent / "s000002")
        assert commit.verify(parent / "s000001")
        make(parent / "s000002", attempt=3, text="again")  # the next attempt can write the same step
        assert newest(parent)[0] == parent / "s000002"
    pytest.fail("the protocol never came to its end")


def test_write_json_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "x" / "value.json"
    assert commit.read_json(path) is None
    commit.write_json(path, {"a": 1})
    commit.write_json(path, {"a": 2})
    assert commit.read_json(path) == {"a": 2}
    assert os.listdir(path.parent) == ["value.json"]


def test_files_that_are_written_together(tmp_path: Path) -> None:
    target = tmp_path / "samples" / "0"
    commit.write_files(target, {f"g{number}": bytes([number]) * 5000 for number in range(40)})
    commit.write_files(target, {"g1": b"new", "g40": b"another"})
    found = {path.name: path.read_bytes() for path in target.iterdir()}
    expected = {f"g{number}": bytes([number]) * 5000 for number in range(40)} | {"g1": b"new", "g40": b"another"}
    assert found == expected, "and nothing beside them"
    commit.write_files(target, {})
    (target / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):
        commit.write_files(target, {"g2": b"new", "taken": b"?"})


def test_paths_of_messages_stay_inside(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    assert run.inside("samples/0/g.safetensors") == run.path / "samples/0/g.safetensors"
    for path in ("../other/x", "/etc/passwd", "samples/../../x"):
        with pytest.raises(RunError, match="leaves the run directory"):
            run.inside(path)


def test_ledger(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert open_attempt(run, "7.0", ["a", "b"]).number == 1
    with run.attempts.open("a") as file:
        file.write('{"number": 2, "jo')  # killed while writing
    assert open_attempt(run, "7.1", ["a", "b"]).number == 2
    assert [attempt.job for attempt in read_attempts(run)] == ["7.0", "7.1"]
    found = find_attempt(run, "7.1")
    assert found is not None
    assert found.number == 2
    assert outcome_of(run, 2) is None
    report_outcome(run, 2, "failed", "the cause", "agent-1")
    report_outcome(run, 2, "failed", "a consequence", "agent-0")
    report_outcome(run, 1, "done", "a zombie", "agent-0")
    outcome = outcome_of(run, 2)
    assert outcome is not None
    assert outcome.message == "the cause"
    assert outcome.step == 0
    assert [(outcome.attempt, outcome.kind) for outcome in read_outcomes(run)] == [(1, "lost"), (2, "failed")]
    cancel_outcome(run, 2)
    assert [outcome.final for outcome in read_outcomes(run)] == [False, True]
    assert not list(run.outcomes.glob(".*"))
