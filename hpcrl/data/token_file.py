"""Stores a dataset's rows as tokens, written once and read by every rank through a memory map. A row is one sequence, or several.

<directory>/            committed as a whole (hpcrl/rundir/commit.py)
  tokens.i32            token ids of all sequences, one after the other
  mask.u8               of each token, whether it is trained
  images.bin            files of the images and videos of sequences, one after the other; images.npy: of each its sequence, end and checksum.
                        Only where the model reads images, or learns to generate them (with the prompt before them, in UTF-8).
                        `images` of the manifest describes their preparation, which follows when a row is read
  rows.npy              of each sequence: where its tokens end, how many are trained, checksum of its tokens, mask and margin; its margin,
                        or whether an answer is desirable, 1 or 0
  manifest.json         `name`, `made_of`, `counts`, `sequences` of each row; sizes and checksums of the files above
  COMMIT
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcrl.config.sections.model import Pretrained
from hpcrl.data.family import noted_format
from hpcrl.data.vision.frames import kept_of, shown_of
from hpcrl.data.vision.reader import ImageReader, Preparation, named_tensors
from hpcrl.errors import CommitError, DamagedError
from hpcrl.rundir.commit import Fence, committed_directory, unfenced, verify
from hpcrl.types import Row

if TYPE_CHECKING:
    import numpy as np

    from hpcrl.data.conversations import Tokens

_TOKENS, _MASK, _ROWS = "tokens.i32", "mask.u8", "rows.npy"
_IMAGES, _PLACES = "images.bin", "images.npy"
_IMAGE_FIELDS = [("sequence", "<i8"), ("end", "<i8"), ("checksum", "<u4")]
_FIELDS = [("end", "<i8"), ("trained", "<i4"), ("checksum", "<u4"), ("margin", "<f4")]


class Images:
    """The images of an open dataset of tokens, prepared as they are read.

    Args:
        content: files of all images, one after the other.
        places: of each its sequence, ascending, where it ends, and its checksum.
        prepared: the model that sees them, and `seeing` as of Preparation; or the values of a family's RowFormat.
    """

    def __init__(self, path: Path, content: np.ndarray, places: np.ndarray, prepared: Mapping[str, Any]) -> None:
        self._path, self._content, self._places, self._prepared = path, content, places, prepared
        self._reader: ImageReader | None = None
        self._format = noted_format(prepared)

    def tensors(self, sequence: int) -> dict[str, np.ndarray]:
        """Return the tensors of a sequence's images, as its sample carries them.

        Raises:
            DamagedError: they are not what was written.
        """
        import numpy as np

        first, last = np.searchsorted(self._places["sequence"], [sequence, sequence + 1])
        if first == last:
            return {}
        contents, facts = [self._file(at) for at in range(first, last)], dict(self._prepared)
        if self._format is not None:
            return self._format.tensors(contents, sequence)
        if self._reader is None:
            model = Pretrained(facts["path"], facts["revision"])
            self._reader = ImageReader.of(model, Preparation(**facts["seeing"]))
        if self._reader is None:
            raise DamagedError(f"{self._path} has images, and its model sees none any more")
        return named_tensors([self._reader.seen(shown_of(content)) for content in contents])

    def _file(self, at: int) -> bytes:
        begin = int(self._places["end"][at - 1]) if at else 0
        content = self._content[begin : int(self._places["end"][at])].tobytes()
        if zlib.crc32(content) != self._places["checksum"][at]:
            raise DamagedError(f"image {at} of {self._path} is damaged")
        return content


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
    _images: Images | None = None

    def __len__(self) -> int:
        """Return how many rows it has."""
        return len(self._rows) // self.sequences

    @property
    def sequences(self) -> int:
        """Of each row."""
        return self.facts.get("sequences", 1)  # before there were pairs, a row was one

    @property
    def name(self) -> str:
        return self.facts["name"]

    def lengths(self, row: int) -> list[int]:
        """Return the tokens of each sequence of a row."""
        return [int(self._rows["end"][at]) - self._begin(at) for at in self._places(row)]

    def trained(self, row: int) -> list[int]:
        """Return how many tokens of each sequence of a row are trained."""
        return [int(self._rows["trained"][at]) for at in self._places(row)]

    def rewards(self, row: int) -> list[float]:
        """Return of each sequence of a row 1 where it is a chosen or a desirable answer, else 0."""
        return [self._margin(row)] if self.sequences == 1 else [1.0, *[0.0] * (self.sequences - 1)]

    def predicted(self, row: int) -> int:
        """Return how many tokens of a row of one sequence are trained and predicted, which its first one is not."""
        return int(self._content(row)[1][1:].sum())

    def digest(self, row: int) -> str:
        return "".join(f"{int(self._rows['checksum'][at]):08x}" for at in self._places(row)).rjust(32, "0")

    def read(self, row: int, digest: str | None = None) -> list[Row]:
        """Return the sequences of a row as samples that no policy has chosen; the reward of the last token is the margin.

        Args:
            digest: what `digest` returned where the batch was composed; None: in no batch.

        Raises:
            DamagedError: it is not what was written, or another one.
        """
        if not 0 <= row < len(self):
            raise DamagedError(f"{self.path} has {len(self)} rows, and row {row} of it is wanted")
        whole = digest in (None, self.digest(row))
        if not (whole and all(self._is_whole(at) for at in self._places(row))):
            raise DamagedError(f"row {row} of {self.path} is damaged, or not the one that the batch was composed of")
        return [self._sample(at) for at in self._places(row)]

    def _sample(self, at: int) -> Row:
        import numpy as np

        tokens, mask = self._content(at)
        count, rewards = len(tokens), np.zeros(len(tokens), np.float32)
        rewards[-1] = self._margin(at)
        return Row(
            token_ids=tokens.astype(np.int64),
            loss_mask=mask.astype(np.float32),
            rollout_logprobs=np.zeros(count, np.float32),
            versions=np.full(count, -1, np.int32),
            rewards=rewards,
            stop_reason="stop",
            tensors=self._images.tensors(at) if self._images else {},
        )

    def _is_whole(self, at: int) -> bool:
        return _checksum(*self._content(at), self._margin(at)) == self._rows["checksum"][at]

    def _margin(self, at: int) -> float:
        return float(self._rows["margin"][at]) if "margin" in (self._rows.dtype.names or ()) else 0.0

    def _content(self, at: int) -> tuple[np.ndarray, np.ndarray]:
        where = slice(self._begin(at), int(self._rows["end"][at]))
        return self._tokens[where], self._mask[where]

    def _places(self, row: int) -> range:
        return range(row * self.sequences, (row + 1) * self.sequences)

    def _begin(self, at: int) -> int:
        return int(self._rows["end"][at - 1]) if at else 0


def write_tokens(
    target: Path,
    attempt: int,
    sequences: Iterable[Tokens],
    fence: Fence = unfenced,
    of_each_row: int = 1,
    **facts: Any,
) -> None:
    """Commit sequences, each with at least one token, in their order.

    Args:
        of_each_row: how many of them, one after the other, are a row.
        facts: JSON values that the manifest keeps; `counts` may still change while rows are taken.
    """
    import numpy as np

    with committed_directory(target, attempt, fence=fence, sequences=of_each_row, **facts) as directory:
        index, end, places, shown = list[tuple[int, int, int, float]](), 0, list[tuple[int, int, int]](), 0
        with (
            (directory / _TOKENS).open("wb") as tokens,
            (directory / _MASK).open("wb") as mask,
            (directory / _IMAGES).open("wb") as images,
        ):
            for number, one in enumerate(sequences):
                ids, chosen = np.array(one.token_ids, "<i4"), np.array(one.mask, "u1")
                tokens.write(ids.tobytes())
                mask.write(chosen.tobytes())
                end += len(one.token_ids)
                index.append((end, one.trained, _checksum(ids, chosen, one.margin), one.margin))
                prompts = [] if one.prompt is None else [one.prompt.encode()]
                for content in chain(prompts, (kept_of(image) for *_, image in one.images)):
                    images.write(content)
                    shown += len(content)
                    places.append((number, shown, zlib.crc32(content)))
        np.save(directory / _ROWS, np.array(index, dtype=_FIELDS))
        if "images" in facts:
            np.save(directory / _PLACES, np.array(places, dtype=_IMAGE_FIELDS))
        else:
            (directory / _IMAGES).unlink()


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
        images = None
        if "images" in facts:
            places = np.load(path / _PLACES, mmap_mode="r")
            images = Images(path, _mapped(path / _IMAGES, "u1"), places, facts["images"])
        return TokenFile(path, facts, _mapped(path / _TOKENS, "<i4"), _mapped(path / _MASK, "u1"), rows, images)
    except (CommitError, OSError, ValueError) as error:
        raise DamagedError(f"dataset {path} cannot be read: {error}") from error


def _mapped(path: Path, dtype: str) -> np.ndarray:
    import numpy as np

    return np.memmap(path, dtype, "r") if path.stat().st_size else np.zeros(0, dtype)


def _checksum(tokens: np.ndarray, mask: np.ndarray, margin: float) -> int:
    found = zlib.crc32(mask.tobytes(), zlib.crc32(tokens.tobytes()))
    return zlib.crc32(struct.pack("<f", margin), found) if margin else found
