"""Writes and reads the weights for the engines: safetensors files, tensor by tensor, with a digest of each tensor.

Names, types and shapes are known before the first tensor is, so each goes to its place in the file as soon as it is there. Digests are
made of the bytes that are written, and of those that are loaded: nothing is read for a digest alone. The digest is CRC-32, at several
GB/s: it finds what goes wrong by accident, such as a tensor of another version, and is no protection against anybody.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcrl.errors import CommitError
from hpcrl.faults import fault
from hpcrl.rundir.commit import verify

if TYPE_CHECKING:  # a worker whose engine is another process reads manifests only
    import torch

SUFFIX = ".safetensors"
ADAPTER_FILE, ADAPTER_PREFIX = f"adapter_model{SUFFIX}", "base_model.model."  # of PEFT, which vLLM expects too
_NAMES = {
    "torch.float64": "F64", "torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16", "torch.int64": "I64",
    "torch.int32": "I32", "torch.int16": "I16", "torch.int8": "I8", "torch.uint8": "U8", "torch.bool": "BOOL",
    "torch.float8_e4m3fn": "F8_E4M3", "torch.float8_e5m2": "F8_E5M2",
}  # fmt: skip
_TYPES = {name: dtype.removeprefix("torch.") for dtype, name in _NAMES.items()}
_AHEAD, _MOST_AHEAD = 4, 8  # tensors, or files, that are read at the same time
_PART = 8 << 20
_MOST_NAMED = 8


@dataclass(frozen=True)
class Probe:
    """Trainer's log-probabilities of a few tokens, which engines must reproduce.

    Attributes:
        logprobs: of each token but the first, given those before it, at temperature 1.
        dtype: of the trainer's computation, such as "bfloat16".
    """

    token_ids: list[int]
    logprobs: list[float]
    dtype: str


@dataclass(frozen=True)
class Base:
    """The version that another one has the changes of.

    Attributes:
        name: of its directory, beside the other's.
        digest: of the whole of it.
    """

    name: str
    version: int
    digest: str


@dataclass(frozen=True)
class PublishedWeights:
    """A committed version.

    Attributes:
        tensors: digest by name, in the order of the model.
        size: bytes of its files.
        probe: None where the trainer gave none.
        adapter: whether it is an adapter of the model that the engine was started with, in PEFT's format, and not the whole policy.
        attempt: of the run, that published it.
        base: its files have what has changed since that version (hpcrl/data/weights/changes.py); None: they have all.
        senders: addresses at which ranks of the trainer send its files as long as it is the newest, each its own.
    """

    path: Path
    version: int
    tensors: dict[str, str]
    size: int
    probe: Probe | None = None
    adapter: bool = False
    attempt: int = 0
    base: Base | None = None
    senders: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: Path) -> PublishedWeights:
        """Return what is committed at `path`, after comparing the sizes of its files with the manifest.

        Raises:
            CommitError: nothing is, or a file is missing or cut short.
        """
        manifest = verify(path, checksums=False)
        if "tensors" not in manifest:
            raise CommitError(f"{path} has no digests of its tensors: another version of hpcrl published it")
        size = sum(entry["size"] for entry in manifest["files"].values())
        probe = Probe(**manifest["probe"]) if manifest.get("probe") else None
        adapter = ADAPTER_FILE in manifest["files"]
        base = Base(**manifest["base"]) if manifest.get("base") else None
        version, attempt, senders = manifest["version"], manifest["attempt"], tuple(manifest.get("senders", ()))
        return cls(path, version, manifest["tensors"], size, probe, adapter, attempt, base, senders)

    def read_base(self) -> PublishedWeights:
        """Return the version that this one has the changes of.

        Raises:
            CommitError: it is not there any more, or is another.
        """
        assert self.base, f"{self.path} has all tensors"
        found = PublishedWeights.read(self.path.with_name(self.base.name))
        if found.digest != self.base.digest:
            raise CommitError(f"{self.path} has what changed since another version than the one at {found.path}")
        return found

    @property
    def digest(self) -> str:
        return whole_digest(self.tensors)

    def wrong(self, given: Mapping[str, str], index: int = 0, of: int = 1) -> list[str]:
        """Return the first few tensors that lack, or are others, among digests by name of a share."""
        return sorted({name for name, _ in given.items() ^ self.share(index, of).items()})[:_MOST_NAMED]

    def share(self, index: int, of: int) -> dict[str, str]:
        """Return digest by name of every `of`-th tensor, from `index` on: what one of `of` processes checks that read the same files."""
        return dict(islice(self.tensors.items(), index, None, of))

    def held(self, given: Mapping[str, str], index: int = 0, of: int = 1) -> dict[str, Any]:
        """Return the report of an engine's rank that has loaded tensors: those of its share with these digests."""
        wrong = self.wrong(given, index, of)
        return {"version": self.version, "digest": whole_digest(given), "share": [index, of], "wrong": wrong}


def weight_facts(
    tensors: Mapping[str, str], probe: Probe | None, base: Base | None = None, senders: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the manifest's facts of a version beside its number."""
    facts: dict[str, Any] = {"tensors": dict(tensors), "probe": asdict(probe) if probe else None}
    return facts | ({"base": asdict(base)} if base else {}) | ({"senders": list(senders)} if senders else {})


def whole_digest(tensors: Mapping[str, str]) -> str:
    """Return one digest of names and digests, whatever their order."""
    return hashlib.blake2b(json.dumps(sorted(tensors.items())).encode(), digest_size=16).hexdigest()


def layout(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, dict[str, int]]:
    """Return the header of a file with such tensors, and the offsets of their data behind it, in their order there."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    places, at = dict[str, int](), 0
    # larger types first, so that each tensor is aligned in memory too
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        places[name] = at
        offsets = [at, at + tensor.nbytes]
        header[name] = {"dtype": _NAMES[str(tensor.dtype)], "shape": list(tensor.shape), "data_offsets": offsets}
        at += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, places


class WeightFile:
    """A file that is being written.

    Args:
        tensors: what it will hold, without values (on the meta device).
    """

    def __init__(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        head, self._places = layout(tensors)
        self._tensors, self._start = dict(tensors), len(head)
        self._file: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        write_at(self._file, memoryview(head), 0)

    def write(self, name: str, tensor: torch.Tensor) -> str:
        """Write a CPU tensor to its place; return its digest."""
        assert self._file is not None, "it is closed"
        expected = self._tensors.pop(name)
        assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape), (name, tensor.dtype, tensor.shape)
        data = bytes_of(tensor)
        write_at(self._file, data, self._start + self._places[name])
        return digest_of(data)

    @property
    def complete(self) -> bool:
        return not self._tensors

    def close(self) -> None:
        """Return once it is on the disk."""
        file, self._file = self._file, None
        if file is not None:
            try:
                os.fsync(file)
            finally:
                os.close(file)


class WeightReader:
    """The tensors of all files of a directory.

    The files are open from the start: on most filesystems they can then be read to the end though the version be retired meanwhile.

    Args:
        order: names that come first, in this order: engines need little memory where what belongs together comes together.
        undigested: names whose digests another process of this node makes.
        readers: processes that read on this node at the same time, which share its cores.

    Raises:
        OSError, ValueError: there are none, or they are no safetensors files.
    """

    def __init__(
        self, directory: Path, order: Sequence[str] = (), undigested: Collection[str] = (), readers: int = 1
    ) -> None:
        self._undigested, self._ahead = undigested, _threads(readers)
        self._files: list[int] = []
        self._places: dict[str, tuple[int, dict[str, Any], int]] = {}
        try:
            for path in sorted(directory.glob(f"*{SUFFIX}")):
                self._open(path)
            if not self._files:
                raise ValueError(f"{directory} holds no safetensors file")
        except BaseException:
            self.close()
            raise
        self._names = list(dict.fromkeys([*(name for name in order if name in self._places), *self._places]))

    def _open(self, path: Path) -> None:
        file = os.open(path, os.O_RDONLY)
        self._files.append(file)
        try:
            entries, start = header_of(file)
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} is no safetensors file: {error}") from error
        self._places |= {name: (file, entry, start) for name, entry in entries.items()}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor, str]]:
        """Yield name, tensor and digest, which is empty for the undigested; a few tensors are read ahead."""
        names = iter(self._names)
        with ThreadPoolExecutor(self._ahead, "weights") as pool:
            begun: deque[Future[tuple[str, torch.Tensor, str]]] = deque()
            begun.extend(pool.submit(self._read, name) for name in islice(names, self._ahead))
            while begun:
                found = begun.popleft().result()
                begun.extend(pool.submit(self._read, name) for name in islice(names, 1))
                yield found

    def _read(self, name: str) -> tuple[str, torch.Tensor, str]:
        import torch

        file, entry, start = self._places[name]
        begin, end = entry["data_offsets"]
        data = read_at(file, end - begin, start + begin)
        tensor = torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)
        return (
            name,
            tensor.view(getattr(torch, _TYPES[entry["dtype"]])).view(entry["shape"]),
            "" if name in self._undigested else digest_of(memoryview(data)),
        )

    def close(self) -> None:
        for file in self._files:
            os.close(file)
        self._files.clear()


def _threads(processes: int = 1) -> int:
    """Return how many threads of a process read at the same time, of several processes that share the cores of a node."""
    return max(_AHEAD, min(_MOST_AHEAD, len(os.sched_getaffinity(0)) // processes))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a CPU tensor, in the order of its elements."""
    import torch

    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def copy_files(weights: PublishedWeights, target: Path) -> dict[str, dict[str, int]]:
    """Copy the safetensors files of a version into a directory; return the size of each by name, as a manifest has them."""
    check_tensors(weights, target)
    return sizes_in(target)


def sizes_in(directory: Path) -> dict[str, dict[str, int]]:
    """Return the size of each safetensors file by name, as a manifest has them."""
    return {path.name: {"size": path.stat().st_size} for path in sorted(directory.glob(f"*{SUFFIX}"))}


def check_weights(path: Path) -> None:
    """Compare all files of a version with its manifest, and each tensor with the digest that was published; also of those that it has the changes of.

    Raises:
        CommitError: one differs, is missing or cannot be read.
    """
    verify(path)
    weights = PublishedWeights.read(path)
    if weights.base:
        check_weights(weights.read_base().path)
        return
    try:
        check_tensors(weights)
    except (OSError, ValueError) as error:
        raise CommitError(f"{path} cannot be read: {error}") from error


def check_export(path: Path) -> None:
    """Compare all files of an export with its manifest: those of weights, which have no checksums there, by the digests of their tensors.

    Raises:
        CommitError: one differs, is missing or cannot be read.
    """
    manifest = verify(path)
    if "tensors" not in manifest:  # an earlier version of hpcrl wrote it
        return
    files = [path / name for name, entry in manifest["files"].items() if "blake2b" not in entry]
    try:
        given = {name: digest for file in files for name, digest in _digests(file, None).items()}
    except (OSError, ValueError) as error:
        raise CommitError(f"{path} cannot be read: {error}") from error
    if wrong := PublishedWeights(path, 0, manifest["tensors"], 0).wrong(given):
        raise CommitError(f"{path} holds other tensors than were exported: {', '.join(wrong)}")


def check_tensors(weights: PublishedWeights, copy: Path | None = None) -> None:
    """Compare each tensor with the digest that was published; copy the files into a directory on the way where one is given.

    Raises:
        CommitError: a tensor is missing, or is another.
        OSError, ValueError: a file cannot be read or written.
    """
    files = sorted(weights.path.glob(f"*{SUFFIX}"))
    with ThreadPoolExecutor(_threads(), "weights") as pool:
        parts = list(pool.map(_digests, files, [copy / path.name if copy else None for path in files]))
    given = {name: digest for part in parts for name, digest in part.items()}
    if wrong := weights.wrong(given):
        raise CommitError(f"{weights.path} holds other tensors than were published: {', '.join(wrong)}")


def _digests(source: Path, copy: Path | None) -> dict[str, str]:
    """Return the digest of each tensor in a file, which is copied on the way where a place for that is given."""
    digests: dict[str, str] = {}
    with source.open("rb") as read, copy.open("wb") if copy else nullcontext() as written:
        reading = read.fileno()
        entries, start = header_of(reading)
        if written:
            write_at(written.fileno(), memoryview(read_at(reading, start, 0)), 0)
        for name, entry in entries.items():
            at, end = (start + offset for offset in entry["data_offsets"])
            digest = 0
            while at < end:
                part = memoryview(read_at(reading, min(_PART, end - at), at))
                digest = zlib.crc32(part, digest)
                if written:
                    write_at(written.fileno(), part, at)
                at += len(part)
            digests[name] = f"{digest:08x}"
        if written:
            fault("weights.copied")
    return digests


def header_of(file: int) -> tuple[dict[str, Any], int]:
    """Return the entries of an open safetensors file's tensors, and where their data begin."""
    (length,) = struct.unpack("<Q", read_at(file, 8, 0))
    entries = json.loads(bytes(read_at(file, min(length, os.fstat(file).st_size), 8)))
    entries.pop("__metadata__", None)
    return entries, 8 + length


def digest_of(data: memoryview) -> str:
    return f"{zlib.crc32(data):08x}"


def write_at(file: int, data: memoryview, at: int) -> None:
    while data:
        count = os.pwrite(file, data, at)
        data, at = data[count:], at + count


def read_at(file: int, length: int, at: int) -> bytearray:
    found = bytearray(length)
    rest = memoryview(found)
    while rest:
        count = os.preadv(file, [rest], at)
        if count == 0:
            raise OSError(f"it ends {len(rest)} bytes early")
        rest, at = rest[count:], at + count
    return found
