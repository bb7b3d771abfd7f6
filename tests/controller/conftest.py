"""What the controller's tests do not wait for: its next look at the run."""

from __future__ import annotations

import pytest

from hpcrl.controller import api


@pytest.fixture(autouse=True)
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller in this process looks for a stop file and for failures every 20 ms."""
    monkeypatch.setattr(api, "TICK_S", 0.02)
