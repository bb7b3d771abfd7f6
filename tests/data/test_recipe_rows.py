"""configs/recipes/rows.py makes rows that the recipes can use, from files with the columns of the published datasets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hpcrl.config import Config, EnvironmentConfig
from hpcrl.config.import_path import imported
from hpcrl.data.prompts import load_prompts
from hpcrl.data.sources import Source, training_sources
from hpcrl.envs.rewards.response import Response
from hpcrl.launch.submit.preflight import check_files
from tests.hub import hub
from tests.paths import CONFIGS

RECIPES = CONFIGS / "recipes"
NAMES = {"train": "train", "val": "validation"}
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

COPIES = 1024
"""Of each row: enough for a step of any recipe."""


@pytest.mark.parametrize("kind", PUBLISHED)
def test_rows_of_published_datasets(kind: str, tmp_path: Path) -> None:
    published, recipes = PUBLISHED[kind]
    pq.write_table(pa.Table.from_pylist(published), tmp_path / "published.parquet")
    command = [sys.executable, str(RECIPES / "rows.py"), kind, str(tmp_path / "published.parquet")]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (tmp_path / "rows.jsonl").write_text(found * COPIES)
    for recipe in recipes:
        files = [
            f"data.{name}={[str(tmp_path / 'rows.jsonl')]}".replace("'", '"') for name in ("train_data", "val_data")
        ]
        config = Config.from_toml([RECIPES / f"{recipe}.toml"], files)
        check_files(config)
        prompts = load_prompts(
            training_sources(config.data),
            config.environment.env_class,
            env_class_required=bool(config.environment.env_class),
        )
        assert len(prompts) == COPIES * (1 if kind == "dapo" else len(published))
        assert prompts[0].data_source == "rows"


def test_gsm8k_is_downloaded_and_becomes_rows(tmp_path: Path) -> None:
    """From a server that answers like the hub: the real one is not reached by tests."""
    published = tmp_path / "hub" / "openai" / "gsm8k" / "main"
    published.mkdir(parents=True)
    (question, *_), _ = PUBLISHED["gsm8k"]
    for split, count in (("train", 3), ("test", 2)):
        pq.write_table(pa.Table.from_pylist([question] * count), published / f"{split}-00000-of-00001.parquet")
    with hub(tmp_path / "hub") as address:
        environment = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0"}
        command = [sys.executable, str(RECIPES / "gsm8k.py"), str(tmp_path / "rows")]
        said = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    assert said.splitlines()[0] == f"{tmp_path}/rows/train.jsonl: 3 rows"
    for split, count in (("train", 3), ("test", 2)):
        prompts = load_prompts([Source(str(tmp_path / "rows" / f"{split}.jsonl"))], "gsm8k")
        assert len(prompts) == count
        assert prompts[0].messages[0]["content"].startswith(question["question"])
        assert prompts[0].extras["reward_spec"]["ground_truth"] == question["answer"]


def test_rows_of_the_small_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """configs/recipes/smollm2: rows that its files can use, whose right answers are worth 1 and wrong ones nothing."""
    recipe = RECIPES / "smollm2"
    subprocess.run([sys.executable, str(recipe / "rows.py"), str(tmp_path)], check=True)
    rows = {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in tmp_path.iterdir()}
    assert {len(rows[name]) for name in rows if name.endswith("_validation")} == {128}
    for file, kind in {"grpo": "addition", "calculator": "calculator", "sft": "sft", "dpo": "dpo"}.items():
        data = [f'data.{name}_data=["{tmp_path}/{kind}_{split}.jsonl"]' for name, split in NAMES.items()]
        model = f"trainer.policy.model.path={CONFIGS}/quickstart/model"  # its own is made by a script
        check_files(Config.from_toml([recipe / f"{file}.toml"], [*data, model]))
        asked = [{json.dumps(row["prompt"]) for row in rows[f"{kind}_{split}"]} for split in NAMES.values()]
        assert not asked[0] & asked[1]

    monkeypatch.syspath_prepend(recipe)
    addition, calculator = imported("a reward", "reward:addition"), imported("an environment", "tool:Calculator")
    assert all(row["prompt"] == pair["prompt"] for row, pair in zip(rows["sft_train"], rows["dpo_train"], strict=True))
    for row, pair in zip(rows["addition_validation"], rows["dpo_validation"], strict=True):
        said = {name: pair[name][0]["content"] for name in ("chosen", "rejected")}
        answers = {
            name: Response(text=text, messages=row["prompt"], **row["reward_spec"]) for name, text in said.items()
        }
        assert [addition(answers[name], EnvironmentConfig()) for name in answers] == [1.0, 0.0]
        assert addition(replace(answers["chosen"], text=said["chosen"] + "."), EnvironmentConfig()) == 0.0
    for row in rows["calculator_validation"]:
        question = row["prompt"][-1]["content"]
        played = calculator(row)
        (shown,) = played.step(f"calc: {question}").observations
        first, other = map(int, question.split(" * "))
        assert shown == {"role": "tool", "content": str(first * other)}
        assert played.step(f"It is {shown['content']}").reward == 1.0
        assert calculator(row).step(f"It is {first * other + 1}").reward == 0.0
