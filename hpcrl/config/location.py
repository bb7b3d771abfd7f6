"""The type of a setting that names a file, a directory or something on a hub."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

LOCATION = "location"

Location = Annotated[str, LOCATION]
"""Text that `locate` resolves when a configuration is read."""


def locate(text: str, base: Path) -> str:
    """Return `text` with `~` expanded and a leading `./` or `../` resolved against the directory `base`.

    Anything else is absolute afterwards if it exists in the working directory, because a job may run elsewhere; if not, it stays
    as it is: a model's id on a hub, or a path that will be missed. So does text that no file can be called.
    """
    try:
        if text == "~" or text.startswith("~/"):
            return os.path.expanduser(text)
        if text in (".", "..") or text.startswith(("./", "../")):
            return os.path.realpath(base / text)
        return os.path.abspath(text) if text and os.path.exists(text) else text
    except ValueError:  # a zero byte, half of a surrogate pair
        return text
