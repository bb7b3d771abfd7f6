"""Reads images of datasets and environments, and converts them to texts for JSON: an absolute path, or a data URL."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from hpcrl.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Exif, Image

_STATE = "state:"
_DATA_URL = re.compile(r"data:(?:image|video)/[\w.+-]+;base64,")
_FORMATS = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"RIFF": "webp", b"GIF8": "gif", b"BM": "bmp"}
_VIDEOS = re.compile(rb"\x1aE\xdf\xa3|....ftyp", re.DOTALL)  # WebM and Matroska; MP4 and QuickTime
_READ = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # Pillow has readers that start programs
_TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}  # by EXIF's orientation. Pillow's exif_transpose also writes the EXIF again, and fails where that of a file is odd
_SIDEWAYS = (5, 6, 7, 8)
_PNG_STARTS = b"\x89PNG\r\n\x1a\n"
_PNG_CHUNK = re.compile(rb".{4}\w{4}", re.DOTALL)
_PNG_DESCRIBES = (
    b"IHDR",
    b"eXIf",
    b"tEXt",
    b"zTXt",
    b"iTXt",
)  # behind the header each may have EXIF, or XMP with an orientation
SHOWN = 60
"""Characters of an image's text that an error tells."""


def image_text(value: Any, folder: Path | None = None) -> str:
    """Return an image as a text: an absolute path, or a data URL.

    Args:
        value: a path, a data URL, the bytes of a file, or an image of Pillow. Also {"bytes": …, "path": …} as in Hugging Face's datasets, or
            {"url": …} as in OpenAI's messages.
        folder: of relative paths; None: there are none.

    Raises:
        DataError: it is none of these, or there is no such file.
    """
    if isinstance(value, Mapping):
        given = [value[name] for name in ("bytes", "path", "url") if value.get(name)]
        value = given[0] if given else value
    if isinstance(value, bytes | bytearray):
        return _data_url(bytes(value))
    if isinstance(value, str) and value:
        return _as_text(value, folder)
    if not isinstance(value, str) and hasattr(value, "save") and hasattr(value, "convert"):
        file = io.BytesIO()
        value.save(file, "png")
        return _data_url(file.getvalue())
    raise DataError(f"expected an image as a path, a data URL or the bytes of a file, found {value!r:.80}")


def state_text(measured: Sequence[float]) -> str:
    """Return a robot's measurements as a text, in the place of an image's."""
    return _STATE + json.dumps([float(number) for number in measured])


def state_in(image: str) -> list[float] | None:
    """Return the numbers of `state_text`; None: it is an image's."""
    return json.loads(image.removeprefix(_STATE)) if image.startswith(_STATE) else None


def png(frames: Sequence[Image], frame_ms: float = 0.0) -> bytes:
    """Return the PNG file of one image, or an animated one of several, each of which is seen for so many milliseconds."""
    first, *others = frames
    moves = {"save_all": True, "append_images": others, "duration": frame_ms, "loop": 0}
    first.save(file := io.BytesIO(), "PNG", **(moves if others else {}))
    return file.getvalue()


def _data_url(content: bytes) -> str:
    if _VIDEOS.match(content):
        return f"data:video/any;base64,{base64.b64encode(content).decode()}"
    kind = next((name for start, name in _FORMATS.items() if content.startswith(start)), None)
    if kind is None:
        raise DataError(f"expected the bytes of a {', '.join(_FORMATS.values())} file, found {content[:16]!r}")
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def _as_text(text: str, folder: Path | None) -> str:
    if text.startswith("data:"):
        if not _DATA_URL.match(text):
            raise DataError(f"expected data:image/<type>;base64,…, found {text[:SHOWN]!r}")
        return text
    if re.match(r"https?:", text):
        raise DataError(
            f"{text[:SHOWN]!r}: images are not downloaded; save them beside the dataset and give their paths"
        )
    path = located(text, folder)
    if not path.is_file():
        raise DataError(f"image {path}: no such file")
    return str(path)


def located(text: str, folder: Path | None) -> Path:
    """Return an absolute path; arguments and errors as of `image_text`."""
    path = Path(text.removeprefix("file://")).expanduser()
    if path.is_absolute():
        return path
    if folder is None:
        raise DataError(f"image {text!r}: expected an absolute path, or a data URL")
    return folder.absolute() / path


def opened(image: str) -> Image:
    """Return an image, turned upright and in RGB. Raises DataError where there is none, or it cannot be read."""
    return next(iter(Frames(image)))


class _InBase64(io.RawIOBase):
    """The content of an image's data URL, whose base64 begins at `start`; only what is read is decoded. Reading raises as `place_of` does."""

    def __init__(self, image: str, start: int) -> None:
        self._image, self._start, self._at = image, start, 0

    @property
    def _size(self) -> int:
        return (len(self._image) - self._start) // 4 * 3 - self._image[-2:].count("=")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        from_ = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, from_ + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read bytes; every three are four characters."""
        first, end = self._at // 3, -((self._at + len(buffer)) // -3)
        content = _decoded(self._image, self._start + 4 * first, self._start + 4 * end)
        found = content[self._at - 3 * first :][: len(buffer)]
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)

    def readall(self) -> bytes:
        return self.read(self._size) or b""


@contextmanager
def _reading(image: str, *, header: bool = False) -> Iterator[Image]:
    """Have an image that is read: all of it, or its header, so that not all of a data URL is decoded."""
    from PIL import Image

    url = _DATA_URL.match(image) if header else None
    try:
        place = io.BufferedReader(_InBase64(image, url.end())) if url else place_of(image)
        with Image.open(place, formats=_READ) as found:
            yield found
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"image {image[:SHOWN]}: {error}") from error


class Frames:
    """The frames of an image, one where it is not animated, each turned upright and in RGB. Errors as of `opened`."""

    def __init__(self, image: str) -> None:
        self._image = image

    def __len__(self) -> int:
        with _reading(self._image) as found:
            return getattr(found, "n_frames", 1)

    @property
    def fps(self) -> float | None:
        """Frames a second, by how long the first is seen; None: it does not say."""
        with _reading(self._image) as found:
            found.load()  # APNG and WebP tell with the first frame
            duration = found.info.get("duration", 0)
        return 1000 / duration if duration else None

    def __iter__(self) -> Iterator[Image]:
        from PIL import Image

        with _reading(self._image) as found:
            for at in count():
                try:
                    found.seek(at)
                except EOFError:  # to count them first would read the whole file
                    return
                turn = _TURNS.get(_orientation(found.getexif()))
                upright = found.transpose(Image.Transpose[turn]) if turn else found
                yield upright.convert("RGB")


def check_pixels(image: str, most: int) -> None:
    """Refuse an image with more pixels, of which only the header is read; errors as of `opened`."""
    with _reading(image, header=True) as found:
        width, height = found.size
    if width * height > most:
        raise DataError(f"an image of {width} x {height} pixels: expected at most {most:,} pixels; make it smaller")


def size_of(image: str) -> tuple[int, int]:
    """Return height and width of an image, of which no pixel is decoded; errors as of `opened`."""
    with _reading(image, header=True) as found:
        width, height = found.size
        hidden = found.format == "PNG" and "exif" not in found.info
        orientation = _orientation(_exif_of_png(found) if hidden else found.getexif())
    return (width, height) if orientation in _SIDEWAYS else (height, width)


def _orientation(exif: Exif) -> Any:
    """Return the orientation in EXIF, of whatever type its writer gave it; 1 where there is none."""
    from PIL import ExifTags

    return exif.get(ExifTags.Base.Orientation, 1)


def _exif_of_png(image: Any) -> Exif:
    """Return the EXIF of a PNG that has none before its pixels: its `getexif` finds it behind them, and decodes them for that."""
    from PIL import Image, PngImagePlugin

    file = io.BytesIO()
    file.write(_PNG_STARTS)
    for kind, data in [*_described(image.fp, image.is_animated), (b"IDAT", b"")]:
        PngImagePlugin.putchunk(file, kind, data)
    with Image.open(file, formats=["PNG"]) as found:
        return Image.Image.getexif(found)


def _described(file: IO[bytes], animated: bool) -> Iterator[tuple[bytes, bytes]]:
    """Yield the chunks of a PNG that may have EXIF, and its header, as far as Pillow reads with the first frame."""
    file.seek(len(_PNG_STARTS))
    seen = False  # the first pixels
    while _PNG_CHUNK.match(start := file.read(8)):
        size, kind = int.from_bytes(start[:4], "big"), start[4:]
        if kind == b"IEND" or (kind == b"fcTL" and seen and animated):
            return
        seen |= kind in (b"IDAT", b"fdAT")
        if kind in _PNG_DESCRIBES:
            yield kind, file.read(size)
            size = 0
        file.seek(size + 4, io.SEEK_CUR)


def file_of(image: str) -> bytes:
    """Return the bytes of an image's file; errors as of `opened`."""
    try:
        found = place_of(image)
        return Path(found).read_bytes() if isinstance(found, str) else found.getvalue()
    except OSError as error:
        raise DataError(f"image {image[:SHOWN]}: {error}") from error


def place_of(image: str) -> str | io.BytesIO:
    """Return the path of an image's file, or its content. Raises DataError where its text is no base64."""
    if not (match := _DATA_URL.match(image)):
        return image
    return io.BytesIO(_decoded(image, match.end()))


def _decoded(image: str, start: int, end: int | None = None) -> bytes:
    """Return the bytes of a part of an image's data URL; errors as of `place_of`."""
    try:
        return base64.b64decode(image[start:end], validate=True)
    except ValueError as error:  # binascii.Error is one
        raise DataError(f"image {image[:SHOWN]}: no base64: {error}") from error
