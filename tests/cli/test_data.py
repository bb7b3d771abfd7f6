"""`hpcrl data check`: what becomes of rows is said before anything is started."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hpcrl.cli.main import main
from hpcrl.config import Config
from hpcrl.data.sources import Source
from hpcrl.data.token_cache import TokenCache
from hpcrl.data.tokenize import Recipe, Tokenizer
from hpcrl.rundir.layout import Run
from tests.paths import CONFIGS

EXPERIMENT, PAIRS = (str(CONFIGS / name) for name in ("sft_tiny.toml", "dpo_tiny.toml"))


def talk(question: str, answer: str) -> dict:
    return {"conversations": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def check(path: Path, rows: list, *settings: str, experiment: str = EXPERIMENT) -> int:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return main(
        [
            "data",
            "check",
            experiment,
            f"data.train_data=['{path}']",
            "data.val_data=[]",
            "trainer.eval_interval=0",
            "trainer.ckpt_keep_best=",
            "trainer.ckpt_keep_best_mode=",
            *settings,
        ]
    )


def test_counts_lengths_and_three_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [talk("ab", "c"), talk("ab", "cdefghij"), talk("abcdefghijkl", "c"), *[talk("a", "b")] * 4]
    assert check(tmp_path / "rows.jsonl", rows, "trainer.max_length=10", "data.too_long=drop") == 0
    said = capsys.readouterr().out
    assert "5 rows, " in said
    assert "longest row 17; 0 cut, 2 dropped as too long, 0 with nothing to train" in said
    assert (
        "50% have at most 6, 90% have at most 14, 99% have at most 14, the longest 17; trainer.max_length is 10" in said
    )
    assert [line for line in said.splitlines() if line.startswith("===")] == [
        "=== row 0: 7 tokens, 2 of them trained", "=== row 3: 6 tokens, 2 of them trained", "=== row 4: 6 tokens, 2 of them trained",
    ]  # fmt: skip
    assert "--- context, 5 tokens\n<|user|>ab<|end|><|assistant|>\n--- trained, 2 tokens\nc<|end|>\n" in said


def test_rows_that_cannot_be_used_are_told_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(tmp_path / "rows.jsonl", [talk("a", "b"), *[{"conversations": 3}] * 5]) == 1
    said = capsys.readouterr().out
    assert "cannot be used: row 1: expected a list of chat messages, found 3" in said
    assert "cannot be used: 2 rows more" in said


def test_of_a_pair_both_answers_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": "ab", "chosen": "c", "rejected": "dd"}, {"prompt": "ab", "chosen": "c", "rejected": 3}]
    assert check(tmp_path / "rows.jsonl", rows, experiment=PAIRS) == 1
    said = capsys.readouterr().out
    assert "1 rows, 15 tokens, 5 of them trained; longest row 8;" in said
    assert (
        "=== row 0, chosen: 7 tokens, 2 of them trained\n--- context, 5 tokens\n<|user|>ab<|end|><|assistant|>\n"
        in said
    )
    assert "=== row 0, rejected: 8 tokens, 3 of them trained" in said
    assert "cannot be used: row 1: expected text or a list of chat messages such as" in said


def test_prompts_are_not_checked_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "check", str(CONFIGS / "quickstart.toml")]) != 0
    assert "trainer.mode" in capsys.readouterr().err


def test_says_whether_the_tokens_are_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = "data.cache=true", f"slurm.root={tmp_path}"
    assert check(tmp_path / "rows.jsonl", [talk("a", "b")], *settings) == 0
    entry = re.search(
        rf"  not kept yet; the first run that makes these tokens keeps them in ({tmp_path}/.tokens/\w+)\n",
        capsys.readouterr().out,
    )
    assert entry
    asked = Config.from_toml([EXPERIMENT], [*settings])
    tokenizer = Tokenizer(Run(tmp_path / "a" / "b"), 1, Recipe.of(asked), cache=TokenCache(tmp_path / ".tokens"))
    tokenizer.dataset("train-0", "rows", Source(str(tmp_path / "rows.jsonl")))
    assert check(tmp_path / "rows.jsonl", [talk("a", "b")], *settings) == 0
    assert f"  kept in {entry[1]}\n" in capsys.readouterr().out
