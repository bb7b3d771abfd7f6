"""Pictures of samples that a run keeps for people: what a policy was shown, and what it has painted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrl.data.vision.families import PIXELS
from hpcrl.data.vision.frames import frames_of
from hpcrl.data.vision.images import opened, png
from hpcrl.data.vision.reader import SeenImage
from hpcrl.envs.rewards.response import VIDEO_FPS
from hpcrl.errors import DataError
from hpcrl.rundir.commit import write_files
from hpcrl.rundir.layout import Run
from hpcrl.types import Kind

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

_OF_VIDEOS = 4  # dimensions of one
_LARGEST = 512  # pixels of a side of an image that was shown: photographs would make a report large


@dataclass(frozen=True)
class KeptPictures:
    """The PNG files of a run's pictures, animated ones of videos.

    What cannot be kept ends no run; the process says why in its log.

    Attributes:
        interval: trainer.multi_modal_log_interval.
    """

    run: Run
    interval: int

    def wants(self, kind: Kind, version: int) -> bool:
        """Return whether pictures of samples that a version generates are kept."""
        return kind == "eval" or version % self.interval == 0

    def painted(self, group_id: str, images: Sequence[np.ndarray]) -> None:
        """Write what the samples of a group have painted.

        Args:
            images: [height, width, 3] uint8, one per sample; of a video [frames, height, width, 3].
        """
        from PIL import Image

        places = [self.run.picture(f"{group_id}.{at}") for at in range(len(images))]
        frames = [
            [Image.fromarray(frame) for frame in (image if image.ndim == _OF_VIDEOS else [image])] for image in images
        ]
        self._write({path: png(own, 1000 / VIDEO_FPS) for path, own in zip(places, frames, strict=True)})

    def shown(self, group_id: str, images: Sequence[Sequence[SeenImage]]) -> None:
        """Write what the samples of a group were shown, in every turn; what all of them begin with is written once.

        Args:
            images: those of each sample, in their order.
        """
        try:
            shown = [[image for image in own if PIXELS in image.tensors] for own in images]
            self._write({path: _small(image) for path, image in _places(self.run, group_id, shown)})
        except DataError as error:  # its file is gone
            _tell(error)

    def _write(self, contents: dict[Path, bytes]) -> None:
        try:
            for folder in {path.parent for path in contents}:
                write_files(folder, {path.name: content for path, content in contents.items()})
        except OSError as error:
            _tell(error)


def _places(run: Run, group_id: str, images: Sequence[Sequence[SeenImage]]) -> Iterator[tuple[Path, SeenImage]]:
    digests = [[image.digest for image in own] for own in images]
    common = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*digests, strict=False)))
    for number, image in enumerate(images[0][:common]):
        yield run.shown_picture(group_id, number), image
    for at, own in enumerate(images):
        for number, image in enumerate(own[common:], common):
            yield run.shown_picture(f"{group_id}.{at}", number), image


def _small(image: SeenImage) -> bytes:
    """Return the file of an image, or of the frames of a video that were shown, not too large."""
    if isinstance(image.source, str):
        frames, seconds = [opened(image.source)], 0.0
    else:
        assert image.choice is not None, "some of its frames were shown"
        frames, seconds = frames_of(image.source, image.choice), image.choice.every
    small: list[Image] = []
    for frame in frames:
        frame.thumbnail((_LARGEST, _LARGEST))
        small.append(frame)
    return png(small, 1000 * seconds)


def _tell(error: Exception) -> None:
    print(f"pictures are not kept: {error}", flush=True)
