"""Plan of the files of an exported model, and a rank's writer of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from hpcrl.data.weight_files import SUFFIX, WeightFile
from hpcrl.faults import fault
from hpcrl.trainer.backends.base import ExportPiece

SHARD_BYTES = 2 << 30


@dataclass
class ShardFile:
    """A file, and the rank that writes it.

    Attributes:
        tensors: what it holds, without values (on the meta device).
        size: their bytes.
    """

    rank: int
    name: str
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    size: int = 0


@dataclass(frozen=True)
class ShardPlan:
    """Assignment of tensors to files and ranks, the same on every rank.

    Attributes:
        owners: the rank that writes each piece.
        shards: of at most so many bytes each; a single larger tensor gets a file alone.
    """

    owners: list[int]
    shards: list[ShardFile]

    @classmethod
    def of(cls, pieces: Sequence[ExportPiece], ranks: int, shard_bytes: int = SHARD_BYTES) -> ShardPlan:
        """Divide pieces among the ranks that can have them, by bytes."""
        loads, owners = [0] * ranks, [0] * len(pieces)
        for number in sorted(range(len(pieces)), key=lambda number: -_size(pieces[number].tensors)):
            rank = min(pieces[number].ranks, key=lambda rank: loads[rank])
            owners[number], loads[rank] = rank, loads[rank] + _size(pieces[number].tensors)
        shards = list[ShardFile]()
        newest: dict[int, ShardFile] = {}
        for owner, piece in zip(owners, pieces, strict=True):
            for name, tensor in piece.tensors.items():
                shard = newest.get(owner)
                if shard is None or shard.size + tensor.nbytes > shard_bytes:
                    shard = newest[owner] = ShardFile(owner, f"model-{len(shards) + 1:05d}{SUFFIX}")
                    shards.append(shard)
                shard.tensors[name] = tensor
                shard.size += tensor.nbytes
        return cls(owners, shards)

    @property
    def index(self) -> dict[str, object]:
        """Return the contents of model.safetensors.index.json."""
        places = {name: shard.name for shard in self.shards for name in shard.tensors}
        return {"metadata": {"total_size": sum(shard.size for shard in self.shards)}, "weight_map": places}


class ShardWriter:
    """Writes the shards of one rank behind the gathering of the next tensors, which all ranks do together.

    At most a shard's bytes wait in memory. An error waits until `finish`: a rank that failed still gathers with the others.

    Args:
        keeps: whether it has the tensors afterwards.

    Attributes:
        kept: them, by name.
    """

    def __init__(self, directory: Path, plan: ShardPlan, rank: int, *, keeps: bool = False) -> None:
        self._directory, self._keeps = directory, keeps
        self.kept: dict[str, torch.Tensor] = {}
        self._shards = {name: shard for shard in plan.shards if shard.rank == rank for name in shard.tensors}
        self._files: dict[str, WeightFile] = {}
        self._pool = ThreadPoolExecutor(1, "weights")
        self._waiting = deque[tuple[Future[dict[str, str]], int]]()
        self._written: list[Future[dict[str, str]]] = []

    @property
    def files(self) -> dict[str, Mapping[str, torch.Tensor]]:
        """The tensors of each file of this rank: with their values where it keeps them, once it is finished."""
        shards = {shard.name: shard for shard in self._shards.values()}
        return {
            name: {each: self.kept.get(each, tensor) for each, tensor in shard.tensors.items()}
            for name, shard in shards.items()
        }

    def put(self, piece: Mapping[str, torch.Tensor]) -> None:
        """Take in CPU tensors of the plan."""
        size = _size(piece)
        while self._waiting and sum(waits for _, waits in self._waiting) + size > SHARD_BYTES:
            self._waiting.popleft()[0].exception()  # until it is written; whether it was is asked at the end
        future = self._pool.submit(self._write, piece)
        self._waiting.append((future, size))
        self._written.append(future)

    def _write(self, piece: Mapping[str, torch.Tensor]) -> dict[str, str]:
        digests = {}
        for name, tensor in piece.items():
            shard = self._shards[name]
            if shard.name not in self._files:
                fault("weights.shard")
                self._files[shard.name] = WeightFile(self._directory / shard.name, shard.tensors)
            file = self._files[shard.name]
            if self._keeps:
                tensor = self.kept[name] = tensor.clone()  # on a CPU it may be the parameter itself
            digests[name] = file.write(name, tensor)
            if file.complete:
                file.close()
        return digests

    def finish(self) -> dict[str, str]:
        """Return the digest of each tensor once all are on the disk."""
        self._pool.shutdown()
        try:
            return {name: digest for future in self._written for name, digest in future.result().items()}
        finally:
            for file in self._files.values():
                with suppress(OSError):
                    file.close()


def _size(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
