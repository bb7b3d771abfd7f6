"""Writes and reads the file of finished groups that a rollout worker hands to the trainer.

Groups of one handover share a file, since a shared filesystem creates few files faster than many. Each group is the content of a safetensors
file: the tensors of all rows laid end to end, their sampling masks where they have any, and their lengths. Further tensors of a row, such as
images, are stored under their digest, once for all equal ones. The header has the GroupMeta as JSON, with the number of rows of each sample:
one, or with generator.step_wise_trajectories one per turn. The controller needs only the header, and not even numpy.

The header has a checksum of each row, compared when it is read. The header has one too, recorded by the batch that trains the group.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from io import BufferedReader
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcrl.data.token_file import open_tokens
from hpcrl.errors import DamagedError
from hpcrl.rundir.commit import digest_of, naming
from hpcrl.types import GroupMeta, Hint, Row, SamplingMask

if TYPE_CHECKING:
    import numpy as np

Conversation = list[dict[str, Any]]
_DTYPES = {
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "U8": "|u1",
    "F32": "<f4",
    "F16": "<f2",
}  # of the format -> of numpy
_TENSORS = ("token_ids", "loss_mask", "rollout_logprobs", "versions", "rewards")
_TOP_IDS = "top_ids"  # [T, K], where a row has them
_MASK_IDS, _MASK_COUNTS = "mask_token_ids", "mask_counts"  # of SamplingMask, where a row has one
_OWN = "tensors"  # in a row's details: name -> [digest, which it has in the file, type, shape] of Row.tensors
# of Hint; in a row's details sizes: its own, of what it replaces, of each wrong one
_HINT_IDS, _HINT = "hint_token_ids", "hint"
_META, _CHECKSUM, _CONVERSATION, _TRUTH = "hpcrl_group", "blake2b", "conversation", "ground_truth"
_MAX_HEADER = 100 << 20  # the format's own limit; a damaged length must not make us read a whole file


def group_bytes(
    samples: Sequence[Row], meta: GroupMeta, conversations: Sequence[Conversation] = (), ground_truth: str = ""
) -> tuple[bytes, GroupMeta]:
    """Return the bytes of a group in a file, and `meta` with their digest; `meta.offset` is their place in the file.

    Args:
        samples: the rows; every array of a row but its `tensors` is [T, ...] with the same T, and `meta.lengths` are these T in the same order.
        conversations: messages of each sample, from its prompt on, for reward models; empty: without reward models.
        ground_truth: of the prompt, for people.
    """
    import numpy as np
    from safetensors.numpy import save

    lengths = [len(sample.token_ids) for sample in samples]
    assert lengths == meta.lengths, f"group {meta.group_id}: lengths {lengths} are not those of its meta {meta.lengths}"
    assert len(samples) == len(meta.owners), f"group {meta.group_id}: {len(samples)} rows, expected {len(meta.owners)}"
    arrays = {name: np.concatenate([getattr(sample, name) for sample in samples]) for name in _TENSORS}
    assert all(len(array) == sum(lengths) for array in arrays.values()), f"group {meta.group_id}: ragged samples"
    if tops := [sample.top_ids for sample in samples if sample.top_ids is not None]:
        unknown = (np.full((length, tops[0].shape[1]), -1, np.int32) for length in lengths)
        arrays[_TOP_IDS] = np.concatenate(
            [none if sample.top_ids is None else sample.top_ids for sample, none in zip(samples, unknown, strict=True)]
        )
    masks = [sample.sampling_mask for sample in samples]
    if any(masks):
        all_tokens = (SamplingMask(np.zeros(0, np.int32), np.zeros(length, np.int32)) for length in lengths)
        masks = [mask or every for mask, every in zip(masks, all_tokens, strict=True)]
        arrays |= {
            _MASK_COUNTS: np.concatenate([mask.counts for mask in masks]),
            _MASK_IDS: np.concatenate([mask.token_ids for mask in masks]),
        }
    hints = [sample.hint for sample in samples]
    if hinted := [ids for hint in hints if hint is not None for ids in (hint.token_ids, *hint.wrong)]:
        arrays[_HINT_IDS] = np.concatenate(hinted)
    of_hints = [{} if hint is None else {_HINT: _hint_detail(hint)} for hint in hints]
    of_tokens = [0, *accumulate(lengths)]
    ends = {name: of_tokens for name in arrays} | {  # noqa: C420  nobody changes it
        _MASK_IDS: [0, *accumulate(len(mask.token_ids) if mask else 0 for mask in masks)],
        _HINT_IDS: [0, *accumulate(map(_hint_size, of_hints))],
    }
    own: dict[str, np.ndarray] = {}
    details: list[dict[str, Any]] = [
        {
            "stop_reason": sample.stop_reason,
            "env_metrics": sample.env_metrics,
            **of_hints[row],
            **({_OWN: _named(sample.tensors, own)} if sample.tensors else {}),
            _CHECKSUM: _checksum(array[ends[name][row] : ends[name][row + 1]] for name, array in arrays.items()),
        }
        for row, sample in enumerate(samples)
    ]
    last = {owner: row for row, owner in enumerate(meta.owners)}
    for sample, conversation in enumerate(conversations):
        details[last[sample]][_CONVERSATION] = conversation
    header_of_rows = json.dumps(details)
    meta = replace(meta, digest=digest_of(header_of_rows.encode()))
    truth = json.dumps(ground_truth)
    text = f'{{"meta": {json.dumps(meta.to_json())}, "samples": {header_of_rows}, "{_TRUTH}": {truth}}}'
    arrays["lengths"] = np.array(lengths)
    return save(arrays | own, {_META: text, _CHECKSUM: digest_of(text.encode())}), meta


def _named(tensors: Mapping[str, np.ndarray], known: dict[str, np.ndarray]) -> dict[str, list[Any]]:
    """Return the entries of a row's tensors in the header, and add new tensors to `known`, by their digests."""
    import numpy as np

    names = {np.dtype(kind): name for name, kind in _DTYPES.items()}
    entry: dict[str, list[Any]] = {}
    for name, array in tensors.items():
        array = np.ascontiguousarray(array)
        assert array.ndim, f"{name}: a tensor without dimensions"
        digest = digest_of(array.data)
        known[digest] = array
        entry[name] = [digest, names[array.dtype], list(array.shape)]
    return entry


def _checksum(columns: Iterable[Any]) -> str:
    """Return the checksum of a row, by the bytes of its arrays: `_TENSORS`, then _TOP_IDS, counts and ids of its sampling mask, and its hint."""
    digest = hashlib.blake2b(digest_size=16)
    for column in columns:
        digest.update(column)
    return digest.hexdigest()


def read_group(path: Path, indices: Sequence[int] | None = None, expected: GroupMeta | None = None) -> list[Row]:
    """Return rows of the group at `path`, all of them or those at `indices`, in that order, and read no more of the file.

    Args:
        expected: what the batch knows of the group; None: it may be any.

    Raises:
        DamagedError: the file is missing or damaged, or holds another group than the one expected.
    """
    if expected is not None and expected.row is not None:
        row = open_tokens(path).read(expected.row, expected.digest)
        return row if indices is None else [row[at] for at in indices]
    with _opened(path, expected) as (columns, meta, details):
        lengths = columns.read("lengths", 0, len(details)).tolist()
        if columns.entries("lengths") != len(lengths):
            raise _damaged(path, f"{columns.entries('lengths')} lengths for {len(details)} samples")
        if any(columns.entries(name) != sum(lengths) for name in columns.names):
            raise _damaged(path, f"its tensors do not have the {sum(lengths)} entries of its samples")
        if lengths != (expected or meta).lengths:
            raise _damaged(path, f"samples of {lengths} tokens where {(expected or meta).lengths} are expected")
        _check_same(path, meta, expected)
        wanted = range(len(details)) if indices is None else indices
        rows = dict(_rows(path, columns, lengths, details, sorted(set(wanted))))
        return [rows[at] for at in wanted]


def read_conversations(path: Path, expected: GroupMeta) -> list[Conversation]:
    """Return the messages of each sample of the group at `path`; args and errors as in `read_group`."""
    with _opened(path, expected) as (_, meta, details):
        _check_same(path, meta, expected)
        if digest_of(json.dumps(details).encode()) != meta.digest:
            raise _damaged(path, "its header is not what was written")
        found = [row[_CONVERSATION] for row in details if _CONVERSATION in row]
        if len(found) != len(meta.samples):
            raise _damaged(path, f"{len(found)} conversations for {len(meta.samples)} samples")
        return found


def read_truth(path: Path, expected: GroupMeta) -> str:
    """Return the ground truth of the prompt of the group at `path`; empty where none was written. Args and errors as in `read_group`."""
    if expected.row is not None:
        return ""
    with _opened(path, expected) as (columns, meta, _):
        _check_same(path, meta, expected)
        return str(columns.group().get(_TRUTH, ""))


def _rows(
    path: Path, columns: _Columns, lengths: Sequence[int], details: Sequence[dict[str, Any]], wanted: Sequence[int]
) -> Iterator[tuple[int, Row]]:
    ends = [0, *accumulate(lengths)]
    hints = [0, *accumulate(_hint_size(detail) for detail in details)]
    read: dict[str, np.ndarray] = {}
    for _, neighbours in groupby(enumerate(wanted), lambda place: place[1] - place[0]):
        indices = [index for _, index in neighbours]
        first, last = ends[indices[0]], ends[indices[-1] + 1]
        whole = {name: columns.read(name, first, last) for name in columns.names}
        for at in indices:
            own = {name: array[ends[at] - first : ends[at + 1] - first] for name, array in whole.items()}
            mask = columns.sampling_mask(ends[at], ends[at + 1])
            hint = columns.read(_HINT_IDS, hints[at], hints[at + 1]) if columns.has_hints else None
            given = details[at].get(_CHECKSUM)
            if given != _checksum([*own.values(), *mask, *([] if hint is None else [hint])]) and given is not None:
                raise _damaged(path, f"row {at} is not what was written")
            yield (
                at,
                Row(
                    **own,
                    stop_reason=details[at]["stop_reason"],
                    env_metrics=details[at]["env_metrics"],
                    sampling_mask=SamplingMask(mask[1], mask[0]) if mask and len(mask[1]) else None,
                    hint=None if hint is None or not len(hint) else _hint(hint, details[at][_HINT]),
                    tensors={name: columns.own(entry, read) for name, entry in details[at].get(_OWN, {}).items()},
                    turns=(),
                ),
            )


def _hint_detail(hint: Hint[np.ndarray]) -> list[int]:
    return [len(hint.token_ids), hint.replaces, *map(len, hint.wrong)]


def _hint_size(detail: dict[str, Any]) -> int:
    size, _, *wrong = detail.get(_HINT, (0, 0))
    return size + sum(wrong)


def _hint(token_ids: np.ndarray, detail: Sequence[int]) -> Hint[np.ndarray]:
    size, replaces, *wrong = detail
    ends = accumulate(wrong, initial=size)
    return Hint(token_ids[:size], replaces, tuple(token_ids[start:end] for start, end in pairwise(ends)))


class _Columns:
    """The tensors of a group in an open file, of which slices are read along their first dimension.

    safetensors' own slices map the file into memory: where a file shrinks meanwhile, reading it ends the process.
    """

    def __init__(self, path: Path, file: BufferedReader, offset: int) -> None:
        file.seek(offset)
        (size,) = struct.unpack("<Q", file.read(8))
        if size > _MAX_HEADER:
            raise _damaged(path, f"a header of {size} bytes")
        self._path, self._file, self._begin = path, file, offset + 8 + size
        self._header = json.loads(file.read(size))

    @property
    def end(self) -> int:
        """Offset in the file behind the group."""
        return self._begin + max((self._place(name)[1] for name in self._header if name != "__metadata__"), default=0)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors with an entry for each token."""
        return (*_TENSORS, _TOP_IDS) if _TOP_IDS in self._header else _TENSORS

    @property
    def has_hints(self) -> bool:
        return _HINT_IDS in self._header

    def group(self) -> dict[str, Any]:
        """Return the group's entries of the header."""
        text, given = (self._header["__metadata__"].get(name) for name in (_META, _CHECKSUM))
        if given is not None and given != digest_of(text.encode()):
            raise ValueError("its header is not what was written")
        return json.loads(text)

    def entries(self, name: str) -> int:
        start, end, size = self._place(name)
        return (end - start) // size

    def read(self, name: str, start: int, end: int) -> np.ndarray:
        """Return entries `start` to `end`, which the tensor must have."""
        import numpy as np

        entry = self._header[name]
        return np.frombuffer(self.content(name, start, end), _DTYPES[entry["dtype"]]).reshape(-1, *entry["shape"][1:])

    def content(self, name: str, start: int, end: int) -> bytearray:
        """Return the bytes of these entries."""
        begin, limit, size = self._place(name)
        self._file.seek(self._begin + begin + start * size)
        wanted = (end - start) * size
        content = self._file.read(min(wanted, limit - begin - start * size))
        if len(content) != wanted:
            raise _damaged(self._path, f"{name} ends after {len(content)} of {wanted} bytes")
        return bytearray(content)

    def own(self, entry: Sequence[Any], known: dict[str, np.ndarray]) -> np.ndarray:
        """Return a tensor of a row by what its details say; those that were read before are `known`."""
        import numpy as np

        digest, kind, shape = entry
        if digest not in known:
            known[digest] = np.frombuffer(self.own_content(digest), _DTYPES[kind])
        return known[digest].reshape(shape)

    def own_content(self, digest: str) -> bytearray:
        """Return the bytes of a row's tensor, after comparing them with their digest."""
        content = self.content(digest, 0, self.entries(digest))
        if digest_of(content) != digest:
            raise _damaged(self._path, f"tensor {digest} is not what was written")
        return content

    def sampling_mask(self, start: int, end: int) -> list[np.ndarray]:
        """Return counts and ids of that of the places `start` to `end`; empty where the file has none."""
        if _MASK_COUNTS not in self._header:
            return []
        counts = self.read(_MASK_COUNTS, 0, end)
        first, size = int(counts[:start].sum()), int(counts[start:].sum())
        return [counts[start:].copy(), self.read(_MASK_IDS, first, first + size)]

    def rows(self, lengths: Sequence[int], details: Sequence[dict[str, Any]]) -> Iterator[list[bytearray]]:
        """Yield the bytes of each row as `_checksum` wants them."""
        start = ids = hints = 0
        for length, detail in zip(lengths, details, strict=True):
            content = [self.content(name, start, start + length) for name in self.names]
            if _MASK_COUNTS in self._header:
                counts = self.content(_MASK_COUNTS, start, start + length)
                first, ids = ids, ids + sum(memoryview(counts).cast("i"))
                content += [counts, self.content(_MASK_IDS, first, ids)]
            if self.has_hints:
                first, hints = hints, hints + _hint_size(detail)
                content.append(self.content(_HINT_IDS, first, hints))
            start += length
            yield content

    def _place(self, name: str) -> tuple[int, int, int]:
        """Return where a tensor begins and ends, and the bytes of an entry."""
        try:
            entry = self._header[name]
            start, end = entry["data_offsets"]
            return start, end, int(_DTYPES[entry["dtype"]][-1]) * math.prod(entry["shape"][1:])
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged(self._path, f"no usable {name}: {error}") from error


def groups_of(path: Path) -> Iterator[GroupMeta]:
    """Yield the groups of a file, as their headers say; `check_group` compares the rest.

    Raises:
        DamagedError: the file is missing, is another one, or a header is damaged: what is behind that is not found any more.
    """
    offset = 0
    while not offset or offset < path.stat().st_size:
        with _opened(path, offset=offset) as (columns, meta, _):
            if Path(meta.path).name != path.name:
                raise _damaged(path, f"it was written as {meta.path}")
            yield replace(meta, offset=offset)
            offset = columns.end


def check_group(path: Path, expected: GroupMeta | None = None) -> GroupMeta:
    """Return the header of a group of the file at `path`, after comparing all of it with its checksums; without numpy.

    Args:
        expected: what a batch, or the header, knows of the group; None: it is the first one of the file, and may be any.

    Raises:
        DamagedError: the file is missing or damaged, has no checksums, or holds another group than the one expected.
    """
    if expected is not None and expected.row is not None:
        open_tokens(path).read(expected.row, expected.digest)
        return expected
    with _opened(path, expected) as (columns, meta, details):
        _check_same(path, meta, expected)
        if digest_of(json.dumps(details).encode()) != meta.digest or len(meta.lengths) != len(details):
            raise _damaged(path, "it has no checksums of its rows")
        lengths = struct.unpack(f"<{len(details)}q", columns.content("lengths", 0, len(details)))
        if list(lengths) != meta.lengths:
            raise _damaged(path, f"samples of {list(lengths)} tokens where {meta.lengths} are expected")
        for row, (given, content) in enumerate(zip(details, columns.rows(meta.lengths, details), strict=True)):
            if _checksum(content) != given[_CHECKSUM]:
                raise _damaged(path, f"row {row} is not what was written")
        for digest in {entry[0] for given in details for entry in given.get(_OWN, {}).values()}:
            columns.own_content(digest)
        return meta


@contextmanager
def _opened(
    path: Path, expected: GroupMeta | None = None, offset: int = 0
) -> Iterator[tuple[_Columns, GroupMeta, list[dict[str, Any]]]]:
    """Open the columns of a group, its header, and details of its rows.

    Args:
        offset: where in the file it is, where no group is expected.
    """
    if expected is None:
        with _opened_at(path, offset) as group:
            yield group
        return
    try:
        with _opened_at(path, expected.offset) as group:
            yield group
    except DamagedError as error:
        raise DamagedError(f"group {expected.group_id}: {error}") from error


@contextmanager
def _opened_at(path: Path, offset: int) -> Iterator[tuple[_Columns, GroupMeta, list[dict[str, Any]]]]:
    try:
        file = path.open("rb")
    except FileNotFoundError as error:
        raise DamagedError(
            f"sample file {path} is missing: it was removed, or this node does not see the run"
        ) from error
    with file, naming(path):
        try:
            columns = _Columns(path, file, offset)
            group = columns.group()
            meta, details = GroupMeta.from_json(group["meta"]), group["samples"]
        except (struct.error, ValueError, KeyError, TypeError) as error:
            raise _damaged(path, str(error)) from error
        yield columns, meta, details


def _check_same(path: Path, meta: GroupMeta, expected: GroupMeta | None) -> None:
    if expected is not None and (meta.group_id, meta.digest) != (expected.group_id, expected.digest):
        raise _damaged(path, f"it holds a group {meta.group_id}, but not the one that the batch was composed of")


def _damaged(path: Path, why: str) -> DamagedError:
    return DamagedError(f"sample file {path} is damaged ({why}); the next attempt generates the group again")
