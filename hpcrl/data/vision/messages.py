"""Images and videos in chat messages.

A message with images or videos has parts in the place of its text, with images as of hpcrl/data/vision/images.py. Parts are {"type": "text",
"text": …}, {"type": "image", "image": …} and {"type": "video", "video": […], "fps": …}. Rows may also write `<image>` and `<video>` in their texts, once for each
entry of the column of images or videos. An environment of a robot also shows what is measured of it, {"type": "state", "state": [numbers]}, to
policies that take it among their images.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcrl.data.vision.frames import Shown, Video
from hpcrl.data.vision.images import file_of, image_text, state_text
from hpcrl.errors import DataError

Message = dict[str, Any]
_KINDS = "image", "video"
_Left = Mapping[str, Iterator[Any]]


def with_images(messages: Any, images: Any = None, folder: Path | None = None, videos: Any = None) -> Any:
    """Return messages with their images and videos as texts; those that show none are returned as they are, with the text of several parts as
    one.

    Args:
        images, videos: of the row, one or a list of them, in their order; None: the row has no such column. They fill `<image>` and
            `<video>` in texts, and parts without content.
        folder: of relative paths; None: there are none.

    Raises:
        DataError: one is not usable, or there are more or fewer than the messages show.
    """
    if not isinstance(messages, list):
        return messages
    given = {
        kind: _several(values) for kind, values in zip(_KINDS, (images, videos), strict=True) if values is not None
    }
    left = {kind: iter(values) for kind, values in given.items()}
    found = [_shown(message, left, folder) for message in messages]
    for kind, values in left.items():
        if more := list(values):
            raise DataError(
                f"{len(more)} of {len(given[kind])} {kind}s are shown by no message; write <{kind}> where each of them stands"
            )
    return found


def _several(values: Any) -> Sequence[Any]:
    return values if isinstance(values, list) else [values]


def _shown(message: Any, left: _Left, folder: Path | None) -> Any:
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, str) and left:
        texts = re.split(f"(<(?:{'|'.join(left)})>)", content)  # every second one is a mark
        if len(texts) > 1:
            parts = [
                {"type": text[1:-1]} if at % 2 else {"type": "text", "text": text} for at, text in enumerate(texts)
            ]
            content = [part for part in parts if part.get("text") != ""]
    if not isinstance(content, list):
        return message
    parts = [_part(part, left, folder) for part in content]
    if all(part["type"] == "text" for part in parts):
        return {**message, "content": "".join(part["text"] for part in parts)}
    return {**message, "content": parts}


def _part(part: Any, left: _Left, folder: Path | None) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind == "state" and isinstance(part.get("state"), list):
        return {"type": "image", "image": state_text(part["state"])}
    kind = str(kind).removesuffix("_url")
    if kind not in _KINDS:
        raise DataError(f"expected parts of the type text, image or video, found {part!r:.80}")
    value = next((part[name] for name in (kind, f"{kind}_url", "path", "url") if part.get(name)), None)
    if value is None:
        value = next(left.get(kind, iter(())), None)
        if value is None:
            raise DataError(f"messages show more {kind}s than the row has")
    if kind == "image":
        return {"type": "image", "image": image_text(value, folder)}
    return Video.of(value, folder, part.get("fps")).part


def has_images(messages: Sequence[Message]) -> bool:
    """Return whether messages, as `with_images` returns them, show any image or video."""
    return any(isinstance(message.get("content"), list) for message in messages)


def as_sent(messages: Sequence[Message]) -> list[Message]:
    """Return messages with images as clients of OpenAI send them; videos, which they cannot show, stay as they are.

    Raises:
        DataError: the file of one cannot be read.
    """

    def sent(part: dict[str, Any]) -> dict[str, Any]:
        if part["type"] != "image":
            return part
        return {"type": "image_url", "image_url": {"url": image_text(file_of(part["image"]))}}

    return [
        {**one, "content": [sent(part) for part in one["content"]]} if has_images([one]) else one for one in messages
    ]


def without_images(messages: Sequence[Message]) -> tuple[list[Message], list[Shown]]:
    """Return messages with parts that only say where an image or a video stands, and these in their order."""
    shown = list[Shown]()
    if not has_images(messages):
        return list(messages), shown

    def bare(part: dict[str, Any]) -> dict[str, Any]:
        if part["type"] == "text":
            return part
        shown.append(part["image"] if part["type"] == "image" else Video(tuple(part["video"]), part["fps"]))
        return {"type": part["type"]}

    return [
        {**message, "content": [bare(part) for part in message["content"]]} if has_images([message]) else message
        for message in messages
    ], shown
