"""What the controller's tests do not wait for: its next look at the run, and the disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from hpcrl.controller import api

_IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@pytest.fixture(autouse=True)
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller in this process looks for a stop file and for failures every 20 ms."""
    monkeypatch.setattr(api, "TICK_S", 0.02)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A directory in memory: thousands of small files are committed, and each commit waits for the disk several times."""
    with TemporaryDirectory(dir=_IN_MEMORY, ignore_cleanup_errors=True) as directory:
        yield Path(directory)
