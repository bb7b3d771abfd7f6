"""Prepares the images of messages in threads, so that the worker's event loop serves others meanwhile.

Decoding and resizing a photograph takes tens of milliseconds, most in Pillow and numpy, which release the interpreter's lock.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from hpcrl.data.vision.frames import Shown
from hpcrl.data.vision.messages import without_images
from hpcrl.data.vision.reader import ImageReader, SeenImage
from hpcrl.envs.base import Messages
from hpcrl.rollout.threads import CallThreads

_MOST = 8


class ImagePreparation:
    """Prepares images for one model, a bounded number at a time, and each image once at a time.

    Args:
        reader: of the policy; None: it sees no images, and nothing is prepared.
    """

    def __init__(self, reader: ImageReader | None) -> None:
        self._reader = reader
        self._threads = CallThreads(min(_MOST, os.cpu_count() or 1), 0.0)
        self._running: dict[Shown, asyncio.Task[SeenImage]] = {}

    async def prepare(self, messages: Messages) -> Sequence[SeenImage]:
        """Return the images and videos of messages; as long as somebody has them, the reader does not prepare them again."""
        if self._reader is None:
            return ()
        _, images = without_images(messages)
        return await asyncio.gather(*(self._seen(self._reader, image) for image in dict.fromkeys(images)))

    async def _seen(self, reader: ImageReader, image: Shown) -> SeenImage:
        if found := reader.known(image):
            return found
        if image not in self._running:
            self._running[image] = asyncio.create_task(self._prepared(reader, image))
        # a waiting caller may be cancelled while others wait
        return await asyncio.shield(self._running[image])

    async def _prepared(self, reader: ImageReader, image: Shown) -> SeenImage:
        try:
            return await self._threads.call(lambda: reader.seen(image)).result()
        finally:
            del self._running[image]
