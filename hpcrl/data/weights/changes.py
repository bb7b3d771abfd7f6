"""Computes exact changes between two versions of the weights: for each tensor the places of different elements, and their new values.

A step with a small learning rate changes few elements of bfloat16 weights: most updates are smaller than what rounding to it loses
(docs/weights.md has measured shares). A file of changes is a safetensors file that has, of each tensor that changed,

    <name>:gaps     [n] first place, then the distance of each from the one before; in the smallest type that holds them
    <name>:values   [n] the new values, bit by bit, as integers of the same size

or <name> itself, whole, where that is no larger. A tensor that it does not have is as it was.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcrl.data.weight_files import SUFFIX, PublishedWeights, digest_of, header_of, read_at, sizes_in, write_at
from hpcrl.errors import CommitError
from hpcrl.faults import fault

GAPS, VALUES = ":gaps", ":values"
_BITS: dict[int, type[np.signedinteger[Any]]] = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
_GAPS = {"U8": np.uint8, "I16": np.int16, "I32": np.int32, "I64": np.int64}
_AT_ONCE = 4  # files

Bits = npt.NDArray[np.signedinteger[Any]]


def changed(before: Bits, after: Bits) -> dict[str, npt.NDArray[Any]] | None:
    """Return a tensor's changes in a file, by GAPS and VALUES; empty without a change, None where the whole tensor is no larger.

    Args:
        before, after: the bits of all elements, [elements].
    """
    places = np.flatnonzero(before != after)
    if not len(places):
        return {}
    gaps = np.diff(places, prepend=0)
    smallest = next(kind for kind in _GAPS.values() if gaps.max() <= np.iinfo(kind).max)
    found = {GAPS: gaps.astype(smallest), VALUES: after[places]}
    return found if sum(part.nbytes for part in found.values()) < after.nbytes else None


class Changes:
    """The files of changes of a version."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._places: dict[str, tuple[int, dict[str, Any], int]] = {}
        with ExitStack() as files:
            for path in sorted(directory.glob(f"*{SUFFIX}")):
                file = os.open(path, os.O_RDONLY)
                files.callback(os.close, file)
                entries, start = header_of(file)
                self._places |= {name: (file, entry, start) for name, entry in entries.items()}
            self._files = files.pop_all()

    def apply(self, name: str, data: bytearray, width: int) -> bytearray:
        """Return the bytes of a tensor after the changes; they may be made in `data`.

        Args:
            data: the bytes before.
            width: bytes of an element.

        Raises:
            CommitError: they do not fit.
        """
        if name in self._places:
            return self._read(name)[0]
        if name + GAPS not in self._places:
            return data
        gaps, kind = self._read(name + GAPS)
        values, _ = self._read(name + VALUES)
        places = np.cumsum(np.frombuffer(gaps, _GAPS[kind]), dtype=np.int64)
        bits = np.frombuffer(data, _BITS[width])
        try:
            bits[places] = np.frombuffer(values, bits.dtype)
        except (IndexError, ValueError) as error:
            raise CommitError(f"{self._directory} has changes of {name} that do not fit it: {error}") from error
        return data

    def _read(self, name: str) -> tuple[bytearray, str]:
        file, entry, start = self._places[name]
        begin, end = entry["data_offsets"]
        return read_at(file, end - begin, start + begin), entry["dtype"]

    def close(self) -> None:
        self._files.close()


def apply_changes(base: Path, versions: Sequence[PublishedWeights], target: Path) -> dict[str, dict[str, int]]:
    """Write the files of a whole version as they are after the changes of later ones; return the size of each by name, as a manifest has them.

    Args:
        base: directory of the whole version.
        versions: the oldest first; the last one is what is written.

    Raises:
        CommitError: a tensor is missing, or is another than was published.
    """
    with ExitStack() as opened:
        changes = list[Changes]()
        for version in versions:
            changes.append(Changes(version.path))
            opened.callback(changes[-1].close)
        files = sorted(base.glob(f"*{SUFFIX}"))
        with ThreadPoolExecutor(_AT_ONCE, "weights") as pool:
            parts = list(pool.map(lambda path: _apply(path, changes, target / path.name), files))
    given = {name: digest for part in parts for name, digest in part.items()}
    if wrong := versions[-1].wrong(given):
        raise CommitError(
            f"the changes up to {versions[-1].path}, on {base}, give other tensors than were published: {', '.join(wrong)}"
        )
    return sizes_in(target)


def _apply(source: Path, changes: Sequence[Changes], target: Path) -> dict[str, str]:
    digests: dict[str, str] = {}
    with source.open("rb") as read, target.open("wb") as written:
        entries, start = header_of(read.fileno())
        write_at(written.fileno(), memoryview(read_at(read.fileno(), start, 0)), 0)
        for name, entry in entries.items():
            begin, end = entry["data_offsets"]
            data, elements = read_at(read.fileno(), end - begin, start + begin), int(np.prod(entry["shape"]))
            for version in changes:
                data = version.apply(name, data, len(data) // elements) if elements else data
            write_at(written.fileno(), memoryview(data), start + begin)
            digests[name] = digest_of(memoryview(data))
        fault("weights.changed")
    return digests
