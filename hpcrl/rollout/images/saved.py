"""PNG files of a run's samples, for people: input images of prompts and turns, and generated pictures."""

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
class SampleImages:
    """Writes a run's images as PNG files, and videos as animated ones.

    An image that cannot be written ends no run; the process logs the reason.

    Attributes:
        interval: trainer.multi_modal_log_interval.
    """

    run: Run
    interval: int

    def wants(self, kind: Kind, version: int) -> bool:
        """Return whether images of samples of this version are written."""
        return kind == "eval" or version % self.interval == 0

    def save_generated(self, group_id: str, images: Sequence[np.ndarray]) -> None:
        """Write the generated pictures of a group's samples.

        Args:
            images: [height, width, 3] uint8, one per sample; of a video [frames, height, width, 3].
        """
        from PIL import Image

        places = [self.run.picture(f"{group_id}.{at}") for at in range(len(images))]
        frames = [
            [Image.fromarray(frame) for frame in (image if image.ndim == _OF_VIDEOS else [image])] for image in images
        ]
        self._write({path: png(own, 1000 / VIDEO_FPS) for path, own in zip(places, frames, strict=True)})

    def save_inputs(self, group_id: str, images: Sequence[Sequence[SeenImage]]) -> None:
        """Write the input images of a group's samples, of every turn; images that all samples begin with are written once.

        Args:
            images: those of each sample, in their order.
        """
        try:
            shown = [[image for image in own if PIXELS in image.tensors] for own in images]
            self._write({path: _small(image) for path, image in _places(self.run, group_id, shown)})
        except DataError as error:  # its file is gone
            _log_failure(error)

    def _write(self, contents: dict[Path, bytes]) -> None:
        try:
            for folder in {path.parent for path in contents}:
                write_files(folder, {path.name: content for path, content in contents.items()})
        except OSError as error:
            _log_failure(error)


def _places(run: Run, group_id: str, images: Sequence[Sequence[SeenImage]]) -> Iterator[tuple[Path, SeenImage]]:
    digests = [[image.digest for image in own] for own in images]
    common = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*digests, strict=False)))
    for number, image in enumerate(images[0][:common]):
        yield run.shown_picture(group_id, number), image
    for at, own in enumerate(images):
        for number, image in enumerate(own[common:], common):
            yield run.shown_picture(f"{group_id}.{at}", number), image


def _small(image: SeenImage) -> bytes:
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


def _log_failure(error: Exception) -> None:
    print(f"pictures are not kept: {error}", flush=True)
