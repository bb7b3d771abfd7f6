"""The file in which a rollout worker hands a finished group to the trainer.

One safetensors file per group: the tensors of all rows laid end to end, their sampling masks where they have any, their lengths, and
the GroupMeta as JSON in the header, which says how many rows each sample has: one, or with generator.step_wise_trajectories one for
each of its turns. The controller needs only the header; only what gives tensors needs torch, and the controller not even numpy.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BufferedReader
from itertools import accumulate, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcrl.errors import DataError
from hpcrl.rundir.commit import write_bytes
from hpcrl.types import GroupMeta, Sample, SamplingMask

if TYPE_CHECKING:
    import numpy as np
    import torch

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
        samples: the rows; every array of a row is [T] with the same T, and `meta.lengths` are these T in the same order.
    """
    import numpy as np
    from safetensors.numpy import save

    lengths = [len(sample.token_ids) for sample in samples]
    assert lengths == meta.lengths, f"group {meta.group_id}: lengths {lengths} are not those of its meta {meta.lengths}"
    assert len(samples) == len(meta.owners), f"group {meta.group_id}: {len(samples)} rows, expected {len(meta.owners)}"
    arrays = {name: np.concatenate([getattr(sample, name) for sample in samples]) for name in _TENSORS}
    assert all(len(array) == sum(lengths) for array in arrays.values()), f"group {meta.group_id}: ragged samples"
    if masks := [sample.sampling_mask for sample in samples if sample.sampling_mask is not None]:
        counts = [
            np.zeros(length, np.int32) if sample.sampling_mask is None else sample.sampling_mask.counts
            for sample, length in zip(samples, lengths, strict=True)
        ]
        arrays |= {_MASK_IDS: np.concatenate([mask.token_ids for mask in masks]), _MASK_COUNTS: np.concatenate(counts)}
    arrays["lengths"] = np.array(lengths)
    details = [{"stop_reason": sample.stop_reason, "env_metrics": sample.env_metrics} for sample in samples]
    return save(arrays, {_META: json.dumps({"meta": meta.to_json(), "samples": details})})


def read_group(
    path: Path, indices: Sequence[int] | None = None, expected: Sequence[int] | None = None
) -> list[Sample[torch.Tensor]]:
    """Return the rows of the group at `path` as tensors, all of them or those at `indices`, in that order.

    Args:
        expected: tokens of each row of the group; None: whatever the file has.

    Raises:
        DataError: the file is missing or damaged, or its rows do not have the expected lengths.
    """
    return [as_tensors(row) for row in read_arrays(path, expected, indices)]


def as_tensors(row: Sample[np.ndarray]) -> Sample[torch.Tensor]:
    """Return a row as torch has it; the memory is the same."""
    import numpy as np
    import torch

    def tensors(arrays: Sample[np.ndarray] | SamplingMask[np.ndarray]) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(value) for name, value in vars(arrays).items() if isinstance(value, np.ndarray)}

    mask = row.sampling_mask
    return Sample(
        **tensors(row),
        stop_reason=row.stop_reason,
        env_metrics=row.env_metrics,
        sampling_mask=None if mask is None else SamplingMask(**tensors(mask)),
    )


def read_arrays(
    path: Path, expected: Sequence[int] | None = None, indices: Sequence[int] | None = None
) -> list[Sample[np.ndarray]]:
    """Return rows of the group at `path`, without torch, and read no more of the file; args and errors as in `read_group`."""
    with _opened(path) as (columns, _, details):
        lengths = columns.read("lengths", 0, len(details)).tolist()
        if columns.entries("lengths") != len(lengths):
            raise _damaged(path, f"{columns.entries('lengths')} lengths for {len(details)} samples")
        if any(columns.entries(name) != sum(lengths) for name in _TENSORS):
            raise _damaged(path, f"its tensors do not have the {sum(lengths)} entries of its samples")
        if expected is not None and lengths != list(expected):
            raise _damaged(path, f"samples of {lengths} tokens where {list(expected)} are expected")
        wanted = range(len(details)) if indices is None else indices
        rows = dict(_rows(columns, lengths, details, sorted(set(wanted))))
        return [rows[at] for at in wanted]


def _rows(
    columns: _Columns, lengths: Sequence[int], details: Sequence[dict[str, Any]], wanted: Sequence[int]
) -> Iterator[tuple[int, Sample[np.ndarray]]]:
    """Yield the rows at ascending indices; neighbours are read at once."""
    ends = [0, *accumulate(lengths)]
    for _, neighbours in groupby(enumerate(wanted), lambda place: place[1] - place[0]):
        indices = [index for _, index in neighbours]
        first, last = ends[indices[0]], ends[indices[-1] + 1]
        arrays = {name: columns.read(name, first, last) for name in _TENSORS}
        for at in indices:
            own = slice(ends[at] - first, ends[at + 1] - first)
            yield (
                at,
                Sample(
                    **{name: array[own] for name, array in arrays.items()},
                    stop_reason=details[at]["stop_reason"],
                    env_metrics=details[at]["env_metrics"],
                    sampling_mask=columns.sampling_mask(ends[at], ends[at + 1]),
                ),
            )


class _Columns:
    """The one-dimensional tensors of an open safetensors file, of which slices are read.

    safetensors' own slices map the file into memory: where a file shrinks meanwhile, reading it ends the process.
    """

    def __init__(self, path: Path, file: BufferedReader) -> None:
        (size,) = struct.unpack("<Q", file.read(8))
        if size > _MAX_HEADER:
            raise _damaged(path, f"a header of {size} bytes")
        self._path, self._file, self._begin = path, file, 8 + size
        self._header = json.loads(file.read(size))

    def group(self) -> dict[str, Any]:
        """Return what the header says about the group."""
        return json.loads(self._header["__metadata__"][_META])

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

    def sampling_mask(self, start: int, end: int) -> SamplingMask[np.ndarray] | None:
        """Return that of the places `start` to `end`; None where there are none."""
        if _MASK_COUNTS not in self._header:
            return None
        counts = self.read(_MASK_COUNTS, 0, end)
        first, size = int(counts[:start].sum()), int(counts[start:].sum())
        ids = self.read(_MASK_IDS, first, first + size)
        return SamplingMask(ids, counts[start:].copy()) if size else None

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
    with _opened(path) as (_, meta, _):
        return meta


@contextmanager
def _opened(path: Path) -> Iterator[tuple[_Columns, GroupMeta, list[dict[str, Any]]]]:
    """Have the columns of a file, its group, and details of its rows."""
    try:
        file = path.open("rb")
    except FileNotFoundError as error:
        raise DataError(f"sample file {path} is missing: it was removed, or this node does not see the run") from error
    with file:
        try:
            columns = _Columns(path, file)
            group = columns.group()
            meta, details = GroupMeta.from_json(group["meta"]), group["samples"]
        except (struct.error, ValueError, KeyError, TypeError) as error:
            raise _damaged(path, str(error)) from error
        yield columns, meta, details


def _damaged(path: Path, why: str) -> DataError:
    return DataError(f"sample file {path} is damaged ({why}); remove it and the group is generated again")
