"""Ground truths are tried before anything is queued: each, put into an answer, is worth 1, or its row is named."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpcrl.cli.main import main
from hpcrl.config import Config
from hpcrl.envs.base import Environment, Turn
from hpcrl.errors import DataError
from hpcrl.launch.submit.preflight import check_files
from hpcrl.launch.submit.truths import spread
from tests.paths import QUICKSTART

HERE = "tests.launch.submit.test_truths"
MATH = [
    r"\left( \frac{3}{2}, -13 \right)",
    r"5\frac{1}{2}",
    r"\text{Evelyn}",
    r"$x^2$",
    r"First \boxed{3}, then \boxed{4}",
    "0.5",
]


class Odd(Environment):
    """Rewards an even ground truth alone."""

    def __init__(self, extras: Any) -> None:
        self._truth = extras["reward_spec"]["ground_truth"]

    def solution(self) -> str | None:
        return None if self._truth == "unknown" else self._truth

    def step(self, action: str) -> Turn:
        return Turn([], float(int(action) % 2 == 0), done=True)


def rows(path: Path, truths: Sequence[Any], **columns: Any) -> Path:
    lines = [{"prompt": "?", "reward_spec": {"ground_truth": truth}, **columns} for truth in truths]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def given_for(path: Path) -> list[str]:
    sizes = ["trainer.train_batch_size=1", "trainer.policy_mini_batch_size=1"]
    return [f'data.train_data=["{path}"]', "data.val_data=[]", "trainer.eval_interval=0", *sizes]


def checked(path: Path, *overrides: str) -> list[str]:
    given = [*given_for(path), "environment.env_class=", *overrides]
    return [line for line in check_files(Config.from_toml([QUICKSTART], given)) if "ground truth" in line]


@pytest.mark.parametrize(
    ("reward", "truths"),
    [
        ("boxed_math", MATH),
        ("gsm8k", ["42", 42, "1,234.50", "6 * 7 = 42\n#### 42", "-3"]),
        ("direct_math", [r"\frac{1}{2}", "5 apples", "(1, 2)"]),
        ("single_choice", ["B", "<answer>B</answer>", "a long one"]),
    ],
)
def test_ground_truths_that_are_worth_1_are_no_matter(reward: str, truths: list[Any], tmp_path: Path) -> None:
    assert not checked(rows(tmp_path / "rows.jsonl", truths), f"environment.reward_function={{{reward} = 1.0}}")


@pytest.mark.parametrize(
    ("reward", "bad"), [("boxed_math", r"\boxed{}"), ("gsm8k", "1e3"), ("direct_math", "line\nline")]
)
def test_those_that_are_not_are_named_and_an_error_where_none_is(reward: str, bad: str, tmp_path: Path) -> None:
    path, chosen = tmp_path / "rows.jsonl", f"environment.reward_function={{{reward} = 0.0, format = 1.0}}"
    (line,) = checked(rows(path, ["7", bad, "7"]), chosen)
    assert re.search(rf"data.train_data: 1 of 3 ground truths of {path} .* reward '{reward}' .*: row 1: ", line)
    with pytest.raises(DataError, match=f"2 of 2 ground truths of .* reward '{reward}' .*row 0: .*; row 1: "):
        checked(rows(path, [bad, bad]), chosen)


def test_environments_are_tried_too(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    (line,) = checked(rows(path, ["7", "1e3"], env_class="gsm8k"))
    assert "1 of 2" in line
    assert (
        "environment 'gsm8k' as the answer to their own row; correct or drop such rows: row 1: '1e3' is worth 0" in line
    )
    allowed = f'environment.allowed_env_classes=["{HERE}:Odd"]'
    (line,) = checked(rows(path, ["2", "3", "unknown", "word"], env_class=f"{HERE}:Odd"), allowed)
    assert "2 of 3" in line
    assert "row 1: '3' is worth 0; row 3: environment" in line
    assert "ValueError" in line


def test_submit_tells_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = rows(tmp_path / "rows.jsonl", [*["7"] * 30, r"\boxed{}"])
    given = [*given_for(path), "environment.env_class="]
    reward = "environment.reward_function={boxed_math = 1.0}"
    assert main(["submit", str(QUICKSTART), *given, reward, f"slurm.root={tmp_path}", "--local", "--dry-run"]) == 0
    assert "1 of 31 ground truths" in capsys.readouterr().err


def test_rows_are_spread_over_a_file() -> None:
    chosen = spread(range(1000), 64, 60.0)
    assert [number for number, _ in chosen] == list(range(0, 1000, 16))
    assert spread(range(5), 64, 60.0) == [(number, number) for number in range(5)]
