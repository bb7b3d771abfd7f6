"""The rows of configs/reach*.toml: seeds of the arm, as their make.py writes them; none is in both datasets."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from hpcrl.config import Config
from hpcrl.data.prompts import load_prompts
from hpcrl.data.sources import Source
from tests.paths import CONFIGS


@pytest.mark.parametrize(("name", "maker"), [("reach", "reach"), ("reach_vla", "reach"), ("reach_pi05", "reach_pi05")])
def test_making_the_data_again_gives_the_same(tmp_path: Path, name: str, maker: str) -> None:
    make = runpy.run_path(str(CONFIGS / maker / "make.py"))
    data = Config.from_toml([CONFIGS / f"{name}.toml"]).data
    first = make["FIRST_VALIDATION"]
    seeds = range(make["TRAIN_ROWS"]), range(first, first + make["VALIDATION_ROWS"])
    for files, wanted in zip((data.train_data, data.val_data), seeds, strict=True):
        make["write_rows"](tmp_path / "rows.parquet", wanted)
        prompts = load_prompts([Source(file) for file in files], None)
        assert prompts == load_prompts([Source(str(tmp_path / "rows.parquet"))], None)
        assert [prompt.extras["seed"] for prompt in prompts] == list(wanted)
