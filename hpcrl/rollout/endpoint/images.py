"""Images in requests: what protocols have for them as parts of chat messages, and those that a session has shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpcrl.data.vision.images import SHOWN, check_pixels, image_text
from hpcrl.data.vision.messages import without_images
from hpcrl.runtime.http_server import BadRequest

MOST_IMAGES = 100
"""Images of a request, those of its history included."""

MOST_PIXELS = 1 << 25
"""Pixels of an image: decoded, it takes 100 MB."""

MOST_SHOWN = 64 << 20
"""Characters of the data URLs of all images that a session has shown, each counted once."""

_WANTED = "its bytes as data:image/png;base64,… (or jpeg, webp)"
_PAGES, _FRAMES = "send its text, or its pages as images", "send its frames as images"
_REMEDIES = {
    "document": _PAGES,
    "file": _PAGES,
    "input_file": _PAGES,
    "audio": "send what is heard as text",
    "input_audio": "send what is heard as text",
    "video": _FRAMES,
    "video_url": _FRAMES,
    "input_video": _FRAMES,
}


def refused_part(where: str, expected: Sequence[str], part: Any) -> BadRequest:
    """Return the refusal of a part or block of another type than expected, with the remedy where it has one."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    remedy = _REMEDIES.get(kind) if isinstance(kind, str) else None
    types = f"{where}: expected the types {', '.join(expected)}, found"
    return BadRequest(f"{types} {kind}; {remedy}" if remedy else f"{types} {part!r:.80}")


def image_part(url: Any) -> dict[str, Any]:
    """Return an image of a request as a part of a chat message, as of hpcrl/data/vision/messages.py.

    Args:
        url: as a client gives it; None: it names a file that a provider has.

    Raises:
        BadRequest: it is no data URL of an image. A path would be read here, and an address would be asked from here.
        DataError: it is one of another form.
    """
    if url is None:
        raise BadRequest(f"messages: expected an image with {_WANTED}; there are no uploaded files here")
    if not isinstance(url, str) or not url.startswith("data:"):
        raise BadRequest(f"messages: expected an image with {_WANTED}, found {url!r:.{SHOWN}}; nothing is downloaded")
    if not url.startswith("data:image/"):
        raise BadRequest(f"messages: expected an image with {_WANTED}, found {url!r:.{SHOWN}}")
    return {"type": "image", "image": image_text(url)}


class ShownImages:
    """Images of the messages of one session; each is held once, however many requests show it."""

    def __init__(self) -> None:
        self._texts, self._size = dict[str, str](), 0

    @staticmethod
    def check(messages: Sequence[dict[str, Any]]) -> None:
        """Check how many images messages show, and how large these are, of which only headers are read.

        Raises:
            BadRequest: they are too many.
            DataError: one is too large, or none.
        """
        _, images = without_images(messages)
        if len(images) > MOST_IMAGES:
            raise BadRequest(f"messages: {len(images)} images; expected at most {MOST_IMAGES}; leave out the oldest")
        for image in images:
            assert isinstance(image, str), "requests show no videos"
            check_pixels(image, MOST_PIXELS)

    def held(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return messages with the texts of images that were shown before.

        Raises:
            BadRequest: the session has shown too many.
        """
        shown = dict.fromkeys(str(image) for image in without_images(messages)[1])
        size = self._size + sum(len(image) for image in shown if image not in self._texts)
        if size > MOST_SHOWN:
            raise BadRequest(
                f"messages: the images of this sample have more than {MOST_SHOWN >> 20} MiB; send smaller ones"
            )
        self._texts |= {image: image for image in shown if image not in self._texts}
        self._size = size
        return [self._message(one) for one in messages]

    def _message(self, message: dict[str, Any]) -> dict[str, Any]:
        content = message["content"]
        if isinstance(content, str):
            return message
        parts = [{**part, "image": self._texts[part["image"]]} if "image" in part else part for part in content]
        return {**message, "content": parts}
