"""Writes videos of episodes: the policy's images, a frame for each turn, as an animated PNG."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpcrl.data.vision.images import opened, png, state_in
from hpcrl.data.vision.messages import Message, without_images
from hpcrl.rundir.commit import write_bytes
from hpcrl.rundir.layout import Run
from hpcrl.types import Kind

if TYPE_CHECKING:
    from PIL.Image import Image

_FRAME_MS = 250


@dataclass(frozen=True)
class EpisodeVideos:
    """The videos of a run.

    Attributes:
        training: those of training episodes are written too, and not only those of evaluations.
    """

    run: Run
    training: bool

    def wants(self, kind: Kind) -> bool:
        return kind == "eval" or self.training

    def write(self, group_id: str, episodes: Sequence[Iterable[Sequence[Image]]]) -> None:
        """Write the videos of a group, each complete or not at all.

        Args:
            episodes: of each what its policy was shown, time after time: the images of all cameras, which are put side by side.
        """
        for at, shown in enumerate(episodes):
            frames = [_beside(images) for images in shown if images]
            if frames:  # else it failed before anything was seen, or there is no camera
                path = self.run.picture(f"{group_id}.{at}")
                path.parent.mkdir(exist_ok=True)
                write_bytes(path, png(frames, _FRAME_MS))


def shown_in(messages: Sequence[Message]) -> Iterator[list[Image]]:
    """Yield the images of each message."""
    for message in messages:
        shown = without_images([message])[1]
        yield [opened(image) for image in shown if isinstance(image, str) and state_in(image) is None]


def _beside(images: Sequence[Image]) -> Image:
    from PIL.Image import new

    found = new("RGB", (sum(image.width for image in images), max(image.height for image in images)))
    left = 0
    for image in images:
        found.paste(image, (left, 0))
        left += image.width
    return found
