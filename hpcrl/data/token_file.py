"""Rows of a dataset as tokens, made once and read by every rank through a memory map.

<directory>/            committed as a whole (hpcrl/rundir/commit.py)
  tokens.i32            token ids of all rows, one row after the other
  mask.u8               of each token, whether it is trained
  rows.npy              of each row: where its tokens end, how many are trained, checksum of its tokens and mask
  manifest.json         `name`, `made_of`, `counts`; sizes and checksums of the files above
  COMMIT
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcrl.errors import CommitError, DamagedError
from hpcrl.rundir.commit import Fence, committed_directory, unfenced, verify
from hpcrl.types import Sample

if TYPE_CHECKING:
    import numpy as np

    from hpcrl.data.conversations import Tokens

_TOKENS, _MASK, _ROWS = "tokens.i32", "mask.u8", "rows.npy"
_FIELDS = [("end", "<i8"), ("trained", "<i4"), ("checksum", "<u4")]


@dataclass(frozen=True)
class TokenFile:
    """An open dataset of tokens.

    Attributes:
        facts: what its manifest says.
    """

    path: Path
    facts: Mapping[str, Any]
    _tokens: np.ndarray
    _mask: np.ndarray
    _rows: np.ndarray

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def name(self) -> str:
        return self.facts["name"]

    def length(self, row: int) -> int:
        return int(self._rows["end"][row]) - self._begin(row)

    def trained(self, row: int) -> int:
        """Return how many tokens of a row are trained."""
        return int(self._rows["trained"][row])

    def digest(self, row: int) -> str:
        return f"{int(self._rows['checksum'][row]):032x}"

    def read(self, row: int, digest: str | None = None) -> Sample[np.ndarray]:
        """Return a row as a sample that no policy has chosen.

        Args:
            digest: what `digest` returned where the batch was composed; None: in no batch.

        Raises:
            DamagedError: it is not what was written, or another one.
        """
        import numpy as np

        if not 0 <= row < len(self):
            raise DamagedError(f"{self.path} has {len(self)} rows, and row {row} of it is wanted")
        where = slice(self._begin(row), int(self._rows["end"][row]))
        tokens, mask = self._tokens[where], self._mask[where]
        if (digest or self.digest(row)) != self.digest(row) or _checksum(
            tokens.tobytes(), mask.tobytes()
        ) != self._rows["checksum"][row]:
            raise DamagedError(f"row {row} of {self.path} is damaged, or not the one that the batch was composed of")
        count = len(tokens)
        return Sample(
            token_ids=tokens.astype(np.int64),
            loss_mask=mask.astype(np.float32),
            rollout_logprobs=np.zeros(count, np.float32),
            versions=np.full(count, -1, np.int32),
            rewards=np.zeros(count, np.float32),
            stop_reason="stop",
        )

    def _begin(self, row: int) -> int:
        return int(self._rows["end"][row - 1]) if row else 0


def write_tokens(
    target: Path,
    attempt: int,
    rows: Iterable[Tokens],
    fence: Fence = unfenced,
    **facts: Any,
) -> None:
    """Commit rows, each with at least one token, in their order.

    Args:
        facts: JSON values that the manifest keeps; `counts` may still change while rows are taken.

    Raises:
        CommitError: a newer attempt has begun.
    """
    import numpy as np

    with committed_directory(target, attempt, fence=fence, **facts) as directory:
        index, end = list[tuple[int, int, int]](), 0
        with (directory / _TOKENS).open("wb") as tokens, (directory / _MASK).open("wb") as mask:
            for row in rows:
                ids, chosen = np.array(row.token_ids, "<i4").tobytes(), np.array(row.mask, "u1").tobytes()
                tokens.write(ids)
                mask.write(chosen)
                end += len(row.token_ids)
                index.append((end, row.trained, _checksum(ids, chosen)))
        np.save(directory / _ROWS, np.array(index, dtype=_FIELDS))


@lru_cache(maxsize=64)
def open_tokens(path: Path) -> TokenFile:
    """Return a committed dataset; what is read of it stays mapped.

    Raises:
        DamagedError: it is missing, was not committed, or files have other sizes than were written.
    """
    import numpy as np

    try:
        facts = verify(path, checksums=False)
        rows = np.load(path / _ROWS, mmap_mode="r")
        return TokenFile(path, facts, _mapped(path / _TOKENS, "<i4"), _mapped(path / _MASK, "u1"), rows)
    except (CommitError, OSError, ValueError) as error:
        raise DamagedError(f"dataset {path} cannot be read: {error}") from error


def _mapped(path: Path, dtype: str) -> np.ndarray:
    import numpy as np

    return np.memmap(path, dtype, "r") if path.stat().st_size else np.zeros(0, dtype)


def _checksum(tokens: bytes, mask: bytes) -> int:
    return zlib.crc32(mask, zlib.crc32(tokens))
