"""The file in which a rollout worker hands a finished group to the trainer.

One safetensors file per group: the tensors of all rows laid end to end, their sampling masks where they have any, their lengths, and
the GroupMeta as JSON in the header, which says how many rows each sample has: one, or with generator.step_wise_trajectories one for
each of its turns. The controller needs only the header, people look at samples on login nodes: only `write_group` and `read_group`
need torch.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from io import BufferedReader
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcrl.errors import DataError
from hpcrl.rundir.commit import write_bytes
from hpcrl.types import GroupMeta, Sample, SamplingMask

if TYPE_CHECKING:
    import numpy as np

_DTYPES = {"I64": "<i8", "I32": "<i4", "F32": "<f4"}  # of the format -> of numpy
_TENSORS = ("token_ids", "loss_mask", "rollout_logprobs", "versions", "rewards")
_MASK_IDS, _MASK_COUNTS = "mask_token_ids", "mask_counts"  # of SamplingMask, where a row has one
_META = "hpcrl_group"
_MAX_HEADER = 100 << 20  # the format's own limit; a damaged length must not make us read a whole file


def write_group(path: Path, samples: Sequence[Sample], meta: GroupMeta) -> None:
    """Write a group to `path`, complete or not at all; a reader never sees half a file. Args as in `group_bytes`."""
    write_bytes(path, group_bytes(samples, meta))


def group_bytes(samples: Sequence[Sample], meta: GroupMeta) -> bytes:
    """Return the content of a group's file.

    Args:
        samples: the rows; every tensor of a row is [T] with the same T, and `meta.lengths` are these T in the same order.
    """
    import torch
    from safetensors.torch import save

    lengths = [len(sample.token_ids) for sample in samples]
    assert lengths == meta.lengths, f"group {meta.group_id}: lengths {lengths} are not those of its meta {meta.lengths}"
    assert len(samples) == len(meta.owners), f"group {meta.group_id}: {len(samples)} rows, expected {len(meta.owners)}"
    tensors = {name: torch.cat([getattr(sample, name) for sample in samples]) for name in _TENSORS}
    assert all(len(tensor) == sum(lengths) for tensor in tensors.values()), f"group {meta.group_id}: ragged samples"
    if masks := [sample.sampling_mask for sample in samples if sample.sampling_mask is not None]:
        counts = [
            torch.zeros(length, dtype=torch.int32) if sample.sampling_mask is None else sample.sampling_mask.counts
            for sample, length in zip(samples, lengths, strict=True)
        ]
        tensors |= {_MASK_IDS: torch.cat([mask.token_ids for mask in masks]), _MASK_COUNTS: torch.cat(counts)}
    tensors["lengths"] = torch.tensor(lengths)
    details = [{"stop_reason": sample.stop_reason, "env_metrics": sample.env_metrics} for sample in samples]
    return save(tensors, {_META: json.dumps({"meta": meta.to_json(), "samples": details})})


@dataclass(frozen=True)
class Arrays:
    """A row as it lies in its file.

    Attributes:
        columns: name of each tensor of `Sample` -> its values [T].
        sampling_mask: token ids and counts of its SamplingMask; None where it has none.
    """

    columns: dict[str, np.ndarray]
    stop_reason: Any
    env_metrics: dict[str, float]
    sampling_mask: tuple[np.ndarray, np.ndarray] | None = None


def read_group(path: Path, indices: Sequence[int] | None = None, expected: Sequence[int] | None = None) -> list[Sample]:
    """Return the rows of the group at `path`, all of them or those at `indices`, in that order.

    Args:
        expected: tokens of each row of the group; None: whatever the file has.

    Raises:
        DataError: the file is missing or damaged, or its rows do not have the expected lengths.
    """
    import torch

    return [
        Sample(
            **{name: torch.from_numpy(values) for name, values in row.columns.items()},
            stop_reason=row.stop_reason,
            env_metrics=row.env_metrics,
            sampling_mask=SamplingMask(*map(torch.from_numpy, row.sampling_mask)) if row.sampling_mask else None,
        )
        for row in read_arrays(path, expected, indices)
    ]


def read_arrays(
    path: Path, expected: Sequence[int] | None = None, indices: Sequence[int] | None = None
) -> list[Arrays]:
    """Return rows of the group at `path`, without torch, and read no more of the file; args and errors as in `read_group`."""
    _, details = _header(path)
    with path.open("rb") as file:
        columns = _Columns(path, file)
        lengths = columns.read("lengths", 0, len(details)).tolist()
        if columns.entries("lengths") != len(lengths):
            raise _damaged(path, f"{columns.entries('lengths')} lengths for {len(details)} samples")
        if any(columns.entries(name) != sum(lengths) for name in _TENSORS):
            raise _damaged(path, f"its tensors do not have the {sum(lengths)} entries of its samples")
        if expected is not None and lengths != list(expected):
            raise _damaged(path, f"samples of {lengths} tokens where {list(expected)} are expected")
        ends = list(accumulate(lengths))
        return [
            Arrays(
                {name: columns.read(name, ends[at] - lengths[at], ends[at]) for name in _TENSORS},
                details[at]["stop_reason"],
                details[at]["env_metrics"],
                columns.sampling_mask(ends[at] - lengths[at], ends[at]),
            )
            for at in (range(len(details)) if indices is None else indices)
        ]


class _Columns:
    """The one-dimensional tensors of an open safetensors file, of which slices are read.

    safetensors' own slices map the file into memory: where a file shrinks meanwhile, reading it ends the process.
    """

    def __init__(self, path: Path, file: BufferedReader) -> None:
        (size,) = struct.unpack("<Q", file.read(8))
        self._path, self._file, self._begin = path, file, 8 + size
        self._header = json.loads(file.read(size))

    def entries(self, name: str) -> int:
        start, end, dtype = self._place(name)
        return (end - start) // dtype.itemsize

    def read(self, name: str, start: int, end: int) -> np.ndarray:
        """Return entries `start` to `end`, which the tensor must have."""
        import numpy as np

        begin, limit, dtype = self._place(name)
        self._file.seek(self._begin + begin + start * dtype.itemsize)
        wanted = (end - start) * dtype.itemsize
        content = self._file.read(min(wanted, limit - begin - start * dtype.itemsize))
        if len(content) != wanted:
            raise _damaged(self._path, f"{name} ends after {len(content)} of {wanted} bytes")
        return np.frombuffer(bytearray(content), dtype)

    def sampling_mask(self, start: int, end: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Return token ids and counts of the places `start` to `end`; None where there are none."""
        if _MASK_COUNTS not in self._header:
            return None
        counts = self.read(_MASK_COUNTS, 0, end)
        first, size = int(counts[:start].sum()), int(counts[start:].sum())
        return (self.read(_MASK_IDS, first, first + size), counts[start:].copy()) if size else None

    def _place(self, name: str) -> tuple[int, int, np.dtype[Any]]:
        import numpy as np

        try:
            entry = self._header[name]
            start, end = entry["data_offsets"]
            return start, end, np.dtype(_DTYPES[entry["dtype"]])
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged(self._path, f"no usable {name}: {error}") from error


def read_meta(path: Path) -> GroupMeta:
    """Return what the header of the group at `path` says, without reading its tensors and without torch.

    Raises:
        DataError: the file is missing or its header is damaged.
    """
    return _header(path)[0]


def _header(path: Path) -> tuple[GroupMeta, list[dict[str, Any]]]:
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            if size > _MAX_HEADER:
                raise _damaged(path, f"a header of {size} bytes")
            header = json.loads(file.read(size))
        group = json.loads(header["__metadata__"][_META])
        return GroupMeta.from_json(group["meta"]), group["samples"]
    except FileNotFoundError as error:
        raise DataError(f"sample file {path} is missing: it was removed, or this node does not see the run") from error
    except (struct.error, ValueError, KeyError, TypeError) as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: Path, why: str) -> DataError:
    return DataError(f"sample file {path} is damaged ({why}); remove it and the group is generated again")
