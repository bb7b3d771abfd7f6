"""Where things lie in the repository that tests run."""

from __future__ import annotations

import os
from pathlib import Path

ON_GPU = os.environ.get("HPCRL_TEST_GPU") == "1"
"""Whether engines of tests are on a GPU, in bfloat16 (docs/gpu.md)."""

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
QUICKSTART = CONFIGS / "quickstart.toml"
