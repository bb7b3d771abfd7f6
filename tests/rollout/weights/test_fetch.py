"""Weights are found, whole, before the engine is asked to pause."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from hpcrl.errors import CommitError
from hpcrl.rollout.weights.fetch import fetch
from hpcrl.rundir.commit import COMMIT, committed_directory
from tests.rollout.material import make_model, probe_of, publish


@pytest.fixture
def published(tmp_path: Path) -> Path:
    model = make_model(tmp_path / "model", 3)
    return publish(model, tmp_path / "weights" / "v000001", 1, probe=probe_of(model)).path


def test_a_version_is_read_where_it_was_published(published: Path) -> None:
    found = fetch(published)
    assert (found.path, found.version) == (published, 1)
    assert "model.embed_tokens.weight" in found.tensors
    assert found.probe is not None
    assert len(found.probe.logprobs) == len(found.probe.token_ids) - 1


def test_large_files_are_read_in_spans_to_their_ends(published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file,) = published.glob("*.safetensors")
    monkeypatch.setattr("hpcrl.rollout.weights.fetch._SPAN", 1000)
    monkeypatch.setattr("hpcrl.rollout.weights.fetch._PART", 300)
    read = list[tuple[int, int]]()
    preadv = os.preadv

    def noting(opened: int, buffers: list[bytearray], at: int) -> int:
        count = preadv(opened, buffers, at)
        read.append((at, at + count))
        return count

    monkeypatch.setattr(os, "preadv", noting)
    assert fetch(published).path == published
    covered = 0
    for begin, end in sorted(read):
        assert begin <= covered
        covered = max(covered, end)
    assert covered == file.stat().st_size
    read.clear()
    fetch(published, ahead=False)
    assert not read, "an engine that sleeps reads them itself"


def test_damage_is_refused(published: Path) -> None:
    (file,) = published.glob("*.safetensors")
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CommitError, match=f"expected {size} bytes, found {size - 1}"):
        fetch(published)
    file.unlink()
    with pytest.raises(CommitError, match="found no file"):
        fetch(published)


def test_what_was_never_committed_is_refused(published: Path) -> None:
    (published / COMMIT).unlink()
    with pytest.raises(CommitError, match="never committed"):
        fetch(published, patience_s=0.3)
    shutil.rmtree(published.parent)
    with pytest.raises(CommitError, match="never committed"):
        fetch(published, patience_s=0.3)


def test_weights_without_digests_are_refused(tmp_path: Path) -> None:
    with committed_directory(tmp_path / "v000002", 1, version=2) as directory:
        (directory / "model.safetensors").write_bytes(b"0123456789")
    with pytest.raises(CommitError, match="another version of hpcrl"):
        fetch(tmp_path / "v000002")
