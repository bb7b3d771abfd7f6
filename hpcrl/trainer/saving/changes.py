"""Changes between published versions: a rank's tensors of the last version, and the file of changes of the next."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hpcrl.data.weight_files import SUFFIX, Base, WeightFile, bytes_of, digest_of
from hpcrl.data.weights.changes import changed

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Kept(NamedTuple):
    """A committed version, and this rank's tensors of it in host memory.

    Attributes:
        changes: how many versions up to this one were published as changes since the last whole one.
    """

    base: Base
    tensors: dict[str, torch.Tensor]
    changes: int


class ChangesWriter:
    """Writes what has changed of the tensors of one rank, behind the gathering of the next ones; used as a ShardWriter is.

    Args:
        before: the rank's tensors as they were; each is let go once it has been compared.

    Attributes:
        kept: the tensors as they are now.
    """

    def __init__(self, directory: Path, rank: int, before: dict[str, torch.Tensor]) -> None:
        self._path, self._before = directory / f"changes-{rank:05d}{SUFFIX}", before
        self.kept: dict[str, torch.Tensor] = {}
        self._entries: dict[str, torch.Tensor] = {}
        self._pool = ThreadPoolExecutor(1, "weights")
        self._compared: list[Future[dict[str, str]]] = []

    @property
    def files(self) -> dict[str, Mapping[str, torch.Tensor]]:
        """The tensors of each file of this rank, once it is finished."""
        return {self._path.name: self._entries}

    def put(self, piece: Mapping[str, torch.Tensor]) -> None:
        """Take in CPU tensors."""
        self._compared.append(self._pool.submit(self._compare, piece))

    def _compare(self, piece: Mapping[str, torch.Tensor]) -> dict[str, str]:
        digests = {}
        for name, tensor in piece.items():
            now = self.kept[name] = tensor.clone()  # on a CPU it may be the parameter itself
            digests[name] = digest_of(bytes_of(now))
            found = changed(_bits(self._before.pop(name)), _bits(now))
            entries = {"": now} if found is None else {part: torch.from_numpy(array) for part, array in found.items()}
            self._entries |= {name + part: entry for part, entry in entries.items()}
        return digests

    def finish(self) -> dict[str, str]:
        """Return the digest of each tensor once the file is on the disk."""
        self._pool.shutdown()
        digests = {name: digest for future in self._compared for name, digest in future.result().items()}
        file = WeightFile(self._path, {name: entry.to("meta") for name, entry in self._entries.items()})
        try:
            for name, entry in self._entries.items():
                file.write(name, entry)
        finally:
            file.close()
        return digests


def _bits(tensor: torch.Tensor) -> Any:
    return tensor.reshape(-1).view(_BITS[tensor.element_size()]).numpy()
