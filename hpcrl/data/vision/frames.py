"""Reads videos of datasets and environments: a list of frames, or a file or a folder of them."""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcrl.data.vision.images import SHOWN, Frames, file_of, image_text, located, place_of, size_of
from hpcrl.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

FPS = 2.0
"""Frames a second of a video that does not say it, as Qwen's own utilities take it of lists of frames."""
_ENCODED = re.compile(r"data:video/|.*\.(mp4|m4v|mov|webm|mkv|avi)$", re.IGNORECASE)
_FRAMES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif")


@dataclass(frozen=True)
class Video:
    """A video, which messages have as {"type": "video", "video": […], "fps": …}.

    Attributes:
        files: as of `image_text`, with one frame or several each.
        fps: frames a second; None: its file's, else FPS.
    """

    files: tuple[str, ...]
    fps: float | None = None

    @classmethod
    def of(cls, value: Any, folder: Path | None = None, fps: Any = None) -> Video:
        """Return the video that a row or an environment gives.

        Args:
            value: images as of `image_text`, in their order, or a file with frames, or the path of a folder of images. Images of a folder
                are ordered by name. {"video": …, "fps": …} adds the frames per second.
            folder: of relative paths; None: there are none.

        Raises:
            DataError: it is none of these, it has no frames, or there is no such file.
        """
        if isinstance(value, Mapping) and value.get("video") is not None:
            value, fps = value["video"], value.get("fps") if fps is None else fps
        if fps is not None and not (isinstance(fps, int | float) and not isinstance(fps, bool) and 0 < fps < math.inf):
            raise DataError(f"expected fps, the frames a second of a video, above 0, found {fps!r:.80}")
        if isinstance(value, str) and not value.startswith(("data:", "http")) and value:
            path = located(value, folder)
            if path.is_dir():
                value = sorted(str(one) for one in path.iterdir() if one.suffix.lower() in _FRAMES)
        files = [image_text(one, folder) for one in (value if isinstance(value, list | tuple) else [value])]
        if not files:
            raise DataError(f"expected a video with frames, found none in {value!r:.80}")
        return cls(tuple(files), None if fps is None else float(fps))

    @property
    def part(self) -> dict[str, Any]:
        """Part of a chat message with the video."""
        return {"type": "video", "video": list(self.files), "fps": self.fps}

    def kept(self) -> bytes:
        """Return all of it, files included; errors as of `file_of`."""
        files = [image_text(file_of(file)) for file in self.files]
        return json.dumps({"video": files, "fps": self.fps}).encode()


Shown = str | Video
"""What a message shows: an image as of `image_text`, or a video."""


def kept_of(shown: Shown) -> bytes:
    """Return the content of a file with all that a message shows; `shown_of` is its opposite. Errors as of `file_of`."""
    return file_of(shown) if isinstance(shown, str) else shown.kept()


def shown_of(content: bytes) -> Shown:
    return Video.of(json.loads(content)) if content.startswith(b"{") else image_text(content)


@dataclass(frozen=True)
class FrameChoice:
    """Chosen frames of a video, known before they are decoded.

    Attributes:
        places: of the frames, ascending, among all of the video.
        seconds: when each of them is seen.
        every: seconds from one to the next, on the whole.
        height, width: of each.
    """

    places: Sequence[int]
    seconds: Sequence[float]
    every: float
    height: int
    width: int

    @classmethod
    def of(cls, video: Video, most: int) -> FrameChoice:
        """Return all frames of a video, or `most` at equal distances, the first and the last among them."""
        total, fps, height, width = _facts(video)
        count = min(most, total)
        # to the even neighbour where two are as near, as Qwen3-VL's processor chooses
        places = [round(at * (total - 1) / (count - 1)) if count > 1 else 0 for at in range(count)]
        return cls(places, [place / fps for place in places], total / (count * fps), height, width)


def frames_of(video: Video, choice: FrameChoice) -> Iterator[Image]:
    """Yield the frames that are shown, turned upright and in RGB, one after the other: all of them may be large.

    Raises:
        DataError: one cannot be read, or is of another size.
    """
    left = deque(choice.places)
    for at, frame in enumerate(_all(video, left)):
        if at != left[0]:
            continue
        if frame is None:
            break
        if frame.size != (choice.width, choice.height):
            raise DataError(
                f"{_name_of(video)}: frame {at} has {frame.width} x {frame.height} pixels, and the first {choice.width} x {choice.height}; "
                "expected frames of one size"
            )
        yield frame
        left.popleft()
        if not left:
            return
    raise DataError(f"{_name_of(video)}: it has fewer frames than it says, or one cannot be decoded")


def _facts(video: Video) -> tuple[int, float, int, int]:
    first = video.files[0]
    if not _ENCODED.match(first):
        height, width = size_of(first)
        own = Frames(first).fps if len(video.files) == 1 else None
        return sum(len(Frames(file)) for file in video.files), video.fps or own or FPS, height, width
    with _decoder(video) as decoder:
        import cv2

        count, own, height, width = (
            decoder.get(name)
            for name in (
                cv2.CAP_PROP_FRAME_COUNT,
                cv2.CAP_PROP_FPS,
                cv2.CAP_PROP_FRAME_HEIGHT,
                cv2.CAP_PROP_FRAME_WIDTH,
            )
        )
    if count < 1:
        raise DataError(f"{_name_of(video)}: the file does not say how many frames it has; save them as images")
    return int(count), video.fps or own or FPS, int(height), int(width)


def _all(video: Video, wanted: Sequence[int]) -> Iterator[Image | None]:
    if not _ENCODED.match(video.files[0]):
        for file in video.files:
            yield from Frames(file)
        return
    from PIL import Image

    with _decoder(video) as decoder:
        at = 0
        while decoder.grab():
            _, pixels = decoder.retrieve() if at == wanted[0] else (False, None)
            yield None if pixels is None else Image.fromarray(pixels[..., ::-1])
            at += 1


@contextmanager
def _decoder(video: Video) -> Iterator[Any]:
    if len(video.files) != 1:
        raise DataError(f"{_name_of(video)}: expected one file of a video, found {len(video.files)}")
    try:
        import cv2
    except ImportError as error:
        raise DataError(
            f"{_name_of(video)}: OpenCV decodes such files, and it is not installed: pip install 'hpcrl[videos]'; or save the frames "
            "as images, or as a GIF or an animated WebP or PNG"
        ) from error
    place, reads = place_of(video.files[0]), cv2.VideoCapture
    # a file in memory needs the list of options, and is not in the package's types
    found: Any = reads(place, cv2.CAP_FFMPEG) if isinstance(place, str) else reads(place, cv2.CAP_FFMPEG, [])  # pyright: ignore[reportCallIssue, reportArgumentType]
    try:
        if not found.isOpened():
            raise DataError(f"{_name_of(video)}: OpenCV cannot read it")
        yield found
    finally:
        found.release()


def _name_of(video: Video) -> str:
    first = video.files[0]
    return f"video {first[:SHOWN] if first.startswith('data:') else first}"
