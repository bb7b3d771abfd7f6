"""Finds the files of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpcrl.config.sections.model import Pretrained


def model_folder(model: Pretrained, patterns: list[str]) -> Path:
    """Return the directory of a model; files of the hub are downloaded where they are missing.

    Args:
        patterns: names of the wanted files.

    Raises:
        OSError, ValueError: there is no such model, here or on the hub.
    """
    if Path(model.path).is_dir():
        return Path(model.path)
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import OfflineModeIsEnabled

    options: dict[str, Any] = {"allow_patterns": patterns, **model.at_revision}
    try:
        return Path(snapshot_download(model.path, **options))
    except (httpx.ConnectError, httpx.TimeoutException, OfflineModeIsEnabled):
        # of a commit it asks for the list of files, even where they are in the cache
        return Path(snapshot_download(model.path, local_files_only=True, **options))
