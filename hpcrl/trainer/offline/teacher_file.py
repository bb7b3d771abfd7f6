"""Stored log-probabilities of a teacher for the rows of a dataset, written once (`hpcrl score`) and read by every rank through a memory
map.

<directory>/            committed as a whole (hpcrl/rundir/commit.py)
  ids.i32               of each trained token of all rows, one after the other: the teacher's K most probable tokens at its position
  logprobs.f32          their log-probabilities, highest first
  rows.npy              of each row: where its tokens end here, checksum of the row (hpcrl/data/token_file.py), checksum of its tokens and log-probabilities
  manifest.json         `top_k`, that is K; sizes and checksums of the files above
  COMMIT
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrl.data.token_file import TokenFile
from hpcrl.errors import CommitError, DamagedError, DataError
from hpcrl.rundir.commit import verify

if TYPE_CHECKING:
    import numpy as np

_COLUMNS, _ROWS = (("ids.i32", "<i4"), ("logprobs.f32", "<f4")), "rows.npy"
_FIELDS = [("end", "<i8"), ("row", "<u4"), ("checksum", "<u4")]


@dataclass(frozen=True)
class TeacherFile:
    """An open teacher file.

    Attributes:
        top_k: tokens that it has of each place.
    """

    path: Path
    top_k: int
    _ids: np.ndarray
    _logprobs: np.ndarray
    _rows: np.ndarray

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._rows)

    def read(self, row: int, digest: str, top_k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids [n, K] int32 and log-probabilities [n, K] float32 of the most probable tokens in the places of the n trained tokens of a row.

        Args:
            digest: of the row, as `TokenFile.digest` returns it.
            top_k: K, or less than the file has.

        Raises:
            DataError: the file has another row, or fewer tokens.
            DamagedError: the checksum differs.
        """
        if not 0 <= row < len(self) or int(self._rows["row"][row]) != int(digest, 16):
            raise DataError(
                f"{self.path} has not row {row} of the run's dataset, whose tokens are others; write it again with `hpcrl score`, for the data, "
                "tokenizer and template of this run"
            )
        if top_k > self.top_k:
            raise DataError(
                f"{self.path} has the {self.top_k} most probable tokens of each place, and trainer.distillation.top_k is {top_k}; write it again with "
                "`hpcrl score`"
            )
        where = slice(int(self._rows["end"][row - 1]) if row else 0, int(self._rows["end"][row]))
        ids, logprobs = self._ids[where], self._logprobs[where]
        if _checksum(ids, logprobs) != self._rows["checksum"][row]:
            raise DamagedError(f"{self.path}: the entry of row {row} is damaged; write it again with `hpcrl score`")
        return ids[:, :top_k], logprobs[:, :top_k]


@lru_cache(maxsize=64)
def open_teacher_file(path: Path) -> TeacherFile:
    """Open a committed teacher file; read entries stay mapped.

    Raises:
        DamagedError: it is missing, was not committed, or files have other sizes than were written.
    """
    import numpy as np

    try:
        top_k = int(verify(path, checksums=False)["top_k"])
        rows = np.load(path / _ROWS, mmap_mode="r")
        shape = int(rows["end"][-1]), top_k
        ids, logprobs = (np.memmap(path / name, dtype, "r", shape=shape) for name, dtype in _COLUMNS)
    except (CommitError, OSError, ValueError, KeyError, IndexError) as error:
        raise DamagedError(f"{path} cannot be read: {error}") from error
    return TeacherFile(path, top_k, ids, logprobs, rows)


class TeacherWriter:
    """Writes teacher log-probabilities of the rows of a dataset, in any order, from several processes of one machine.

    Args:
        directory: in which `make_room` was called.
        ends: as of `ends_of`.
        top_k: K.
    """

    def __init__(self, directory: Path, ends: np.ndarray, top_k: int) -> None:
        import numpy as np

        shape, self._ends = (int(ends[-1]), top_k), ends
        self._files = [np.memmap(directory / name, dtype, "r+", shape=shape) for name, dtype in _COLUMNS]

    def write(self, row: int, ids_NK: np.ndarray, logprobs_NK: np.ndarray) -> int:
        """Write the entry of a row, and return its checksum."""
        where = slice(int(self._ends[row - 1]) if row else 0, int(self._ends[row]))
        for file, values in zip(self._files, (ids_NK, logprobs_NK), strict=True):
            file[where] = values
        return _checksum(*(file[where] for file in self._files))

    def flush(self) -> None:
        for file in self._files:
            file.flush()


def ends_of(tokens: TokenFile) -> np.ndarray:
    """Return of each row of a dataset how many trained tokens it and those before it have, without what nothing predicts, a row's first token."""
    import numpy as np

    return np.cumsum([tokens.predicted(row) for row in range(len(tokens))], dtype=np.int64)


def make_room(directory: Path, ends: np.ndarray, top_k: int) -> None:
    for name, _ in _COLUMNS:
        with (directory / name).open("wb") as file:
            file.truncate(4 * int(ends[-1]) * top_k)


def write_index(directory: Path, tokens: TokenFile, ends: np.ndarray, checksums: Sequence[int]) -> None:
    """Complete a file of which all rows are written.

    Args:
        checksums: of each row, as `TeacherWriter.write` returns them.
    """
    import numpy as np

    index = np.zeros(len(tokens), _FIELDS)
    index["end"], index["checksum"] = ends, checksums
    index["row"] = [int(tokens.digest(row), 16) for row in range(len(tokens))]
    np.save(directory / _ROWS, index)


def _checksum(ids_NK: np.ndarray, logprobs_NK: np.ndarray) -> int:
    return zlib.crc32(logprobs_NK.tobytes(), zlib.crc32(ids_NK.tobytes()))
