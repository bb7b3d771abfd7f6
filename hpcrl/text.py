"""Makes foreign text (datasets, policies, environments, users' exceptions, files of a run) safe for a terminal or a name."""

from __future__ import annotations

import re
from typing import Any

# What steers a terminal, turns the direction of text or ends a line where others see none, and halves of characters, which no terminal
# can be given. Newline and tab are none of them.
_STEERING = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_NOT_IN_NAMES = re.compile(r"[^\w .,:;+=@%()/-]")
_LONGEST_NAME = 80


class NotUtf8Error(ValueError):
    """Bytes of a file are no text in UTF-8; the message has a guess at their encoding, and the remedy.

    Attributes:
        line: of the first such byte, counted from 1.
    """

    def __init__(self, data: bytes, start: int) -> None:
        wide = data.startswith((b"\xff\xfe", b"\xfe\xff"))
        saved = "UTF-16" if wide else "Latin-1"
        super().__init__(f"not UTF-8 text: byte {start}; saved as {saved}? Save it as UTF-8")
        self.line = data.count(b"\n", 0, start) + 1


def utf8(data: bytes) -> str:
    """Return the text of a file in UTF-8, without the byte order mark with which editors on Windows begin it.

    Raises:
        NotUtf8Error: it is none.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise NotUtf8Error(data, error.start) from None


def printable(text: str) -> str:
    """Return text with what would steer a terminal shown as \\u001b; lines and tabs stay. A JSON text means the same afterwards."""
    return _STEERING.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def one_line(text: str) -> str:
    """Return text as `printable`, in one line."""
    return printable(text.replace("\n", " "))


def markdown_cell(text: str) -> str:
    """Return text as `one_line`, for a cell of a Markdown table."""
    return one_line(text).replace("|", "\\|").replace("<", "&lt;")


def log_lines(text: str) -> list[str]:
    """Return a line of a log as `printable`, without its colours; what was written over with a carriage return comes as lines of its own."""
    return [printable(part) for part in _COLOUR.sub("", text).split("\r") if part] or [""]


def metric_name(text: str) -> str:
    """Return text as a part of a metric's name: letters, digits and some signs, of at most 80 characters."""
    return _NOT_IN_NAMES.sub("_", text)[:_LONGEST_NAME]


def said_in(content: str | list[dict[str, Any]]) -> str:
    """Return the text of a chat message for people: with `<image>` or `<video>` for each image or video."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] if part["type"] == "text" else f"<{part['type']}>" for part in content)
