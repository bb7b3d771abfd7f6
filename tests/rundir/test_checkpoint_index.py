"""The index of a checkpoint is read as data: whatever a pickle names or changes, nothing of it runs, and what is wrong is said with the file."""

from __future__ import annotations

import os
import pickle
import pickletools
from pathlib import Path, PosixPath
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from hpcrl.errors import CommitError
from hpcrl.rundir.checkpoint_index import INDEX, check_indexes, read_index

PATH, SIZE = b"\x80\x04\x8c\x07pathlib\x8c\x09PosixPath\x93", b"\x80\x04\x8c\x05torch\x8c\x04Size\x93"
ATTRIBUTE = b"}\x8c\x04_str\x8c\x04evils"


class Runs:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._marker}",)


def index(file: Any = "__0_0.distcp", dtype: torch.dtype = torch.float32, **more: Any) -> Metadata:
    """Return an index as torch writes it."""
    size = torch.Size((2, 3))
    tensor = TensorStorageMetadata(TensorProperties(dtype), size, [ChunkStorageMetadata(torch.Size((0, 0)), size)])
    places = {MetadataIndex("weight", (0, 0), 0): _StorageInfo(file, 0, 10)}
    return Metadata({"weight": tensor, **more}, {"weight": ("weight",)}, places, StorageMeta(Path("/a/b")), "1.0.0")


def written(folder: Path, content: Any, protocol: int = 4) -> Path:
    data = content if isinstance(content, bytes) else pickle.dumps(content, protocol)
    (folder / INDEX).write_bytes(data)
    return folder


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool]
)
def test_an_index_of_torch_is_read(tmp_path: Path, dtype: torch.dtype, protocol: int) -> None:
    found = read_index(written(tmp_path, index(dtype=dtype, old=BytesStorageMetadata()), protocol))
    tensors = found["state_dict_metadata"]
    assert tensors["weight"].state["size"] == (2, 3)
    assert [chunk.state for chunk in tensors["weight"].state["chunks"]] == [{"offsets": (0, 0), "sizes": (2, 3)}]
    assert tensors["old"].state is None
    ((key, place),) = found["storage_data"].items()
    assert key.state == {"fqn": "weight", "index": 0, "offset": (0, 0)}
    assert place.state == {"relative_path": "__0_0.distcp", "offset": 0, "length": 10}


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_an_index_that_another_python_wrote_is_read(
    tmp_path: Path, protocol: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian 12's Python 3.11.2 writes members of enumerations by their names."""

    def by_name(member: Any, _protocol: int) -> tuple[Any, ...]:
        return getattr, (type(member), member.name)

    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", by_name)
    data = pickle.dumps(index(), protocol)
    assert b"getattr" in data
    assert read_index(written(tmp_path, data))["state_dict_metadata"]["weight"].state["size"] == (2, 3)
    for other in (b"__subclasses__________", b"TORCH_contiguous_forma"):
        with pytest.raises(CommitError, match="getattr of something else"):
            read_index(written(tmp_path, data.replace(b"TORCH_CONTIGUOUS_FORMAT"[: len(other)], other)))


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_what_a_pickle_names_is_not_called(tmp_path: Path, protocol: int) -> None:
    marker = tmp_path / "ran"
    written(tmp_path, index(old=Runs(marker)), protocol)
    with pytest.raises(
        CommitError, match=rf"{tmp_path}/\.metadata names posix\.system, .* could run foreign code.* unchanged copy"
    ):
        read_index(tmp_path)
    assert not marker.exists()
    pickle.loads((tmp_path / INDEX).read_bytes())
    assert marker.exists(), "torch's reader runs it"


@pytest.mark.parametrize(
    "named",
    [b"builtins\neval", b"torch\nload", b"torch\nserialization.os", b"pathlib\nPosixPath.write_text", b"pathlib.\nPosixPath", b"types\nFunctionType"],
)  # fmt: skip
def test_only_what_torch_writes_may_be_named(tmp_path: Path, named: bytes) -> None:
    with pytest.raises(CommitError, match="which no checkpoint of hpcrl does"):
        read_index(written(tmp_path, b"\x80\x04c" + named + b"\n."))


@pytest.mark.parametrize(
    "content",
    [PATH + b"N" + ATTRIBUTE + b"\x86b.", PATH + ATTRIBUTE + b"b.", SIZE + b"N" + ATTRIBUTE + b"\x86b.", SIZE + ATTRIBUTE + b"b."],
)  # fmt: skip
def test_a_pickle_changes_no_class(tmp_path: Path, content: bytes) -> None:
    """All paths of a process would be another one's."""
    assert "BUILD" in [operation.name for operation, _, _ in pickletools.genops(content)]
    with pytest.raises(CommitError, match="is no index of a checkpoint: TypeError"):
        read_index(written(tmp_path, content))
    assert str(PosixPath("/a")) == "/a"


@pytest.mark.parametrize(
    "content",
    [b"", b"text", b"\x80\x04.", b"\x80\x04].", pickle.dumps(index())[:-9], pickle.dumps({}), pickle.dumps(StorageMeta()), pickle.dumps(Path()),
     pickle.dumps(Metadata({}, None, None)), pickle.dumps(index(file=7)), pickle.dumps(index(file=[]))],
)  # fmt: skip
def test_what_is_no_index_is_said(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(CommitError, match=rf"{tmp_path}/\.metadata is no index of a checkpoint"):
        read_index(written(tmp_path, content))


@pytest.mark.parametrize("file", ["../other/__0_0.distcp", "/home/own/model.pt", "folder/../../x"])
def test_tensors_lie_beside_their_index(tmp_path: Path, file: str) -> None:
    with pytest.raises(CommitError, match=rf"\.metadata names the file {file}, expected one beside it"):
        read_index(written(tmp_path, index(file=file)))


def test_each_index_of_a_checkpoint_is_looked_at(tmp_path: Path) -> None:
    written(tmp_path, index())
    critic = tmp_path / "critic"
    critic.mkdir()
    written(critic, index())
    check_indexes(tmp_path)
    written(critic, index(old=Runs(tmp_path / "ran")))
    with pytest.raises(CommitError, match=r"critic/\.metadata names posix\.system"):
        check_indexes(tmp_path)
    (critic / INDEX).unlink()
    with pytest.raises(CommitError, match=r"critic/\.metadata cannot be read: No such file"):
        read_index(critic)
