"""The type of a setting that names a file, a directory or something on a hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

LOCATION = "location"

Location = Annotated[str, LOCATION]
"""Text that `locate` resolves when a configuration is read."""


def locate(text: str, base: Path) -> str:
    """Return `text` with `~` expanded and a leading `./` or `../` resolved against the directory `base`.

    Anything else stays as it is: a path relative to the working directory, an absolute path or a hub id.
    """
    if text == "~" or text.startswith("~/"):
        return str(Path(text).expanduser())
    if text in (".", "..") or text.startswith(("./", "../")):
        return str((base / text).resolve())
    return text
