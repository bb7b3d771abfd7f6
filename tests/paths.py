"""Where things lie in the repository that tests run."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
QUICKSTART = CONFIGS / "quickstart.toml"
