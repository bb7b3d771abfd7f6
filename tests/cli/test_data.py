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
            "trainer.ckpt_keep_best_mode=default",
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


UNREAD = "  columns that nothing reads: "


@pytest.mark.parametrize(
    ("experiment", "row", "unread"),
    [
        ("sft_tiny", {**talk("a", "b"), "note": "Be brief.", "tools": None, "images": None, "id": 3}, ["note", "id"]),
        ("sft_tiny", talk("a", "b"), []),
        ("dpo_tiny", {"prompt": "a", "chosen": "b", "rejected": "c", "note": "Be brief.", "margin": 1}, ["note", "margin"]),
        ("reward_model_tiny", {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 1, "source": "x"}, ["source"]),
    ],
)  # fmt: skip
def test_columns_that_nothing_reads_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], experiment: str, row: dict, unread: list[str]
) -> None:
    settings = ["data.margin_column=margin"] if experiment == "reward_model_tiny" else []
    assert check(tmp_path / "rows.jsonl", [row, row], *settings, experiment=str(CONFIGS / f"{experiment}.toml")) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if line.startswith(UNREAD)] == [UNREAD + ", ".join(unread)] * bool(unread)


PROMPT = {
    "prompt": "sort: ba",
    "reward_spec": {"ground_truth": "ab"},
    "low": 1,
    "high": 7,
    "difficulty": "easy",
    "data_source": "x",
}


@pytest.mark.parametrize(
    ("settings", "unread"),
    [
        (["environment.env_class=sort_letters"], ["low", "high", "difficulty"]),
        (["environment.env_class=guess_number", "generator.max_turns=3"], ["difficulty"]),
        (["environment.env_class=", "environment.reward_function={single_choice=1}"], ["low", "high", "difficulty"]),
        (["environment.env_class=", "environment.reward_function={'own_reward:all_columns'=1}"], []),
        (["environment.env_class=own_reward:Mine"], []),
        (["data.response_column=difficulty"], ["low", "high"]),
    ],
)  # fmt: skip
def test_columns_of_prompts_go_to_what_scores_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: list[str], unread: list[str]
) -> None:
    (tmp_path / "own_reward.py").write_text(OWN)
    row = PROMPT | {"reward_spec": {"ground_truth": "3" if "guess_number" in settings[0] else "ab"}}
    given = [f"python_path=[{tmp_path}]", *settings]
    assert check(tmp_path / "rows.jsonl", [row, row], *given, experiment=str(CONFIGS / "quickstart.toml")) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("ok       tokenizer: ")
    at = said.index(f"{tmp_path}/rows.jsonl: 2 prompts, 0 of them left out as too long")
    assert said[at + 1].startswith("  tokens per prompt: 50% have at most 6")
    assert [line for line in said if line.startswith(UNREAD)] == [UNREAD + ", ".join(unread)] * bool(unread)


OWN = """
def all_columns(response, environment):
    return float(response.extras["low"])

class Mine:
    def __init__(self, extras):
        self.extras = extras
    init = step = close = print
"""


def test_prompts_that_cannot_be_used_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [PROMPT, {"prompt": "sort: ba"}]
    assert check(tmp_path / "rows.jsonl", rows, experiment=str(CONFIGS / "quickstart.toml")) == 1
    assert f"{tmp_path}/rows.jsonl cannot be used: dataset {tmp_path}/rows.jsonl, row uid 1" in capsys.readouterr().out


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
