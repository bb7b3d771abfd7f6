"""What tests of policies that move robots share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.paths import CONFIGS


@pytest.fixture(scope="session")
def reach() -> Path:
    """Return the tiny OpenVLA of configs/reach_vla."""
    return CONFIGS / "reach_vla" / "model"
