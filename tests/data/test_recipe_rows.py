"""configs/recipes/rows.py makes rows that the recipes can use, from files with the columns of the published datasets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hpcrl.config import Config
from hpcrl.data.prompts import load_prompts
from hpcrl.launch.submit.preflight import check_files
from tests.paths import CONFIGS

RECIPES = CONFIGS / "recipes"
_DAPO = {
    "data_source": "math_dapo",
    "prompt": [{"role": "user", "content": 'Solve: 1 + 1. The last line is "Answer: $Answer".'}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "2", "style": "rule"},
    "extra_info": {"index": "9a9b"},
}
PUBLISHED: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
    "gsm8k": (
        [{"question": "How many?", "answer": "1 + 1 = 2\n#### 2"}, {"question": "And now?", "answer": "#### 3"}],
        ["gsm8k_1.5b", "gsm8k_1.5b_async"],
    ),
    "dapo": ([_DAPO, {**_DAPO, "extra_info": {"index": "1c2d"}}], ["dapo_math_8b", "dapo_math_30b_a3b_megatron"]),
    "search": (
        [{"id": "0", "question": "Who wrote it?", "golden_answers": ["Jane", "J. Austen"], "data_source": "nq"}],
        ["search_3b"],
    ),
}
"""Kind: rows as they are published, and the recipes that use such rows."""


@pytest.mark.parametrize("kind", PUBLISHED)
def test_rows_of_published_datasets(kind: str, tmp_path: Path) -> None:
    published, recipes = PUBLISHED[kind]
    pq.write_table(pa.Table.from_pylist(published), tmp_path / "published.parquet")
    command = [sys.executable, str(RECIPES / "rows.py"), kind, str(tmp_path / "published.parquet")]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (tmp_path / "rows.jsonl").write_text(found)
    for recipe in recipes:
        files = [
            f"data.{name}={[str(tmp_path / 'rows.jsonl')]}".replace("'", '"') for name in ("train_data", "val_data")
        ]
        config = Config.from_toml([RECIPES / f"{recipe}.toml"], files)
        check_files(config)
        prompts = load_prompts(
            config.data.train_data, config.environment.env_class, env_class_required=bool(config.environment.env_class)
        )
        assert len(prompts) == (1 if kind == "dapo" else len(published))
        assert prompts[0].data_source == "rows"
