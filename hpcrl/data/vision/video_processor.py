"""Prepares videos for the models of Qwen, on Pillow and numpy: transformers' own video processors need torchvision.

Two frames after each other are the two planes of a patch, where an image fills both planes. Nothing else tells a video from an image: it is
one with several pairs of frames.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcrl.config.sections.model import Pretrained
from hpcrl.data.entries import read_entries
from hpcrl.data.vision.families import GRID, PIXELS, SECONDS, Videos
from hpcrl.data.vision.frames import FrameChoice
from hpcrl.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

_FILES = ("processor_config.json", "video_preprocessor_config.json", "preprocessor_config.json")
_LEAST, _MOST = 128, 768  # tokens, where these files do not say how many pixels there are
_NARROWEST = 200  # times as long as wide


@dataclass(frozen=True)
class VideoProcessor:
    """Prepares videos for one model.

    Attributes:
        images: the model's image processor, on Pillow.
        videos: what its family makes of them.
        least, most: pixels of a frame; of all frames where the prompt has timestamps.
        frame_most: pixels of a frame at most; None: as many as `most` lets it have.
    """

    images: Any
    videos: Videos
    least: int
    most: int
    frame_most: int | None = None

    @classmethod
    def of(cls, model: Pretrained, images: Any, videos: Videos, frame_most: int | None) -> VideoProcessor:
        """Return the video processor of a model, with the bounds that transformers reads of its files.

        Raises:
            OSError, ValueError, TypeError: they cannot be read.
        """
        entries, factor = _entries(model), images.patch_size * images.merge_size
        size = entries.get("size") or {}
        least = entries.get("min_pixels") or size.get("shortest_edge") or _LEAST * factor**2
        most = entries.get("max_pixels") or size.get("longest_edge") or _MOST * factor**2
        return cls(images, videos, int(least), int(most), frame_most)

    def grid(self, choice: FrameChoice) -> tuple[int, int, int]:
        """Return how many patches a video has along time, height and width."""
        height, width = self._size(choice)
        side = self.images.patch_size
        return math.ceil(len(choice.places) / self._planes), height // side, width // side

    def tokens(self, choice: FrameChoice) -> int:
        """Return the tokens of a pair of frames; errors as of `grid`."""
        _, height, width = self.grid(choice)
        return height * width // self.images.merge_size**2

    def moments(self, choice: FrameChoice) -> list[float]:
        """Return when each pair of frames is seen, in seconds: between its first and its last frame; a last one that is alone is its own pair."""
        planes, seconds = self._planes, choice.seconds
        pairs = [seconds[at : at + planes] for at in range(0, len(seconds), planes)]
        return [(pair[0] + pair[-1]) / 2 for pair in pairs]

    def tensors(self, frames: Iterable[Image], choice: FrameChoice) -> dict[str, np.ndarray]:
        """Return the model's inputs: PIXELS [patches, numbers of a patch] float32 and GRID [1, 3] int64; errors as of `grid`.

        Where the family counts in seconds, SECONDS [1] float32 is the time from one pair of frames to the next.

        Args:
            frames: chosen frames, as `frames_of` yields them.
        """
        import numpy as np

        (time, height, width), planes = self.grid(choice), self._planes
        size = width * self.images.patch_size, height * self.images.patch_size
        resized = [frame.resize(size, self.images.resample) for frame in frames]
        flat = self.images(resized, do_resize=False, return_tensors="np")[PIXELS]
        # what an image's planes hold is the frame, twice
        each = flat.reshape(len(resized), height * width, -1, planes, self.images.patch_size**2)[:, :, :, 0]
        whole = np.concatenate([each, *[each[-1:]] * (time * planes - len(resized))])
        pairs = whole.reshape(time, planes, *each.shape[1:]).transpose(0, 2, 3, 1, 4)
        found = {
            PIXELS: np.ascontiguousarray(pairs.reshape(time * height * width, -1)),
            GRID: np.array([[time, height, width]], np.int64),
        }
        if self.videos == "seconds":
            found[SECONDS] = np.array([choice.every * planes], np.float32)
        return found

    @property
    def _planes(self) -> int:
        return self.images.temporal_patch_size

    def _size(self, choice: FrameChoice) -> tuple[int, int]:
        """Return height and width to which frames are resized: the nearest whole tokens, with the shape that they have, within the bounds on
        pixels. As the processors of Qwen2-VL and Qwen3-VL in transformers compute them."""
        height, width = choice.height, choice.width
        if max(height, width) > _NARROWEST * min(height, width):
            raise DataError(f"frames of {width} x {height} pixels: one side is more than {_NARROWEST} times the other")
        side = self.images.patch_size * self.images.merge_size
        frames, filled, most = 1, 1, self.most
        if self.videos == "timestamps":
            frames = max(len(choice.places), self._planes)
            filled = max(round(frames / self._planes), 1) * self._planes
            if min(height, width) < side:
                grown = side / min(height, width)
                height, width = int(height * grown), int(width * grown)
        if self.frame_most is not None:
            most = max(min(most, self.frame_most * filled), self.least)
        whole = round(height / side) * side, round(width / side) * side
        pixels = filled * whole[0] * whole[1]
        if self.least <= pixels <= most:
            return whole
        if pixels > most:
            shrunk = math.sqrt(frames * height * width / most)
            lengths = [max(side, math.floor(length / shrunk / side) * side) for length in (height, width)]
        else:
            grown = math.sqrt(self.least / (frames * height * width))
            lengths = [math.ceil(length * grown / side) * side for length in (height, width)]
        return lengths[0], lengths[1]


def _entries(model: Pretrained) -> dict[str, Any]:
    from transformers.utils.hub import cached_file

    for name in _FILES:
        file = cached_file(model.path, name, **model.at_revision, _raise_exceptions_for_missing_entries=False)
        entries = read_entries(Path(file)) if file else {}
        found = entries.get("video_processor", {}) if name == _FILES[0] else entries
        if found:
            return found
    return {}
