"""Weights are checked before the engine is asked to pause."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hpcrl.errors import CommitError
from hpcrl.rollout.vllm.fetch import fetch
from hpcrl.rundir.commit import COMMIT, committed_directory


@pytest.fixture
def published(tmp_path: Path) -> Path:
    path = tmp_path / "weights" / "v000001"
    with committed_directory(path, 1, version=1) as directory:
        (directory / "model.safetensors").write_bytes(b"0123456789" * 100)
    return path


def test_a_copy_is_complete(published: Path, tmp_path: Path) -> None:
    target = tmp_path / "local"
    for _ in range(2):  # over an old copy too
        fetch(published, target)
        assert (target / "model.safetensors").read_bytes() == b"0123456789" * 100


def test_damage_is_refused(published: Path, tmp_path: Path) -> None:
    file, target = published / "model.safetensors", tmp_path / "local"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CommitError, match="expected 1000 bytes, found 999"):
        fetch(published, target)
    file.write_bytes(b"x" * 1000)
    with pytest.raises(CommitError, match=r"v000001 could not be copied .*checksum"):
        fetch(published, target)
    file.unlink()
    with pytest.raises(CommitError, match="found no file"):
        fetch(published, target)
    assert not target.exists()


def test_what_was_never_committed_is_refused(published: Path, tmp_path: Path) -> None:
    (published / COMMIT).unlink()
    with pytest.raises(CommitError, match="never committed"):
        fetch(published, tmp_path / "local", patience_s=0.3)
    shutil.rmtree(published.parent)
    with pytest.raises(CommitError, match="never committed"):
        fetch(published, tmp_path / "local", patience_s=0.3)
