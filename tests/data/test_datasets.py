"""A ground truth that a reward cannot use is found when rows are loaded, not in the middle of a run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config import DataConfig, EnvironmentConfig
from hpcrl.config.sections.functions import COMPARING_REWARDS
from hpcrl.data.datasets import load_dataset, row_requirements
from hpcrl.data.sources import Source
from hpcrl.envs.rewards.response import Response
from hpcrl.envs.rewards.weighted import REWARDS
from hpcrl.errors import DataError
from tests.paths import ROOT


def fails(environment: EnvironmentConfig, truth: Any, kind: Any = "train") -> bool:
    try:
        row_requirements(environment, (kind,), 1)["check"]("mine:Own", {"reward_spec": {"ground_truth": truth}}, "")
    except DataError:
        return True
    return False


@pytest.mark.parametrize("name", sorted(set(COMPARING_REWARDS) - {"boxed_math"}))
@pytest.mark.parametrize(
    "truth",
    [None, "", " \n", True, False, ["4"], {"a": 4}, 0, 4.5, "4", "forty-two", "so\n#### 4", "units", "x=", "9" * 2000],
)
def test_loading_and_scoring_take_the_same_ground_truths(name: str, truth: Any) -> None:
    environment = EnvironmentConfig(reward_function={"format": 1.0, name: 0.0})
    try:
        REWARDS[name](Response(text="x", ground_truth=truth), environment)
    except DataError:
        assert fails(environment, truth)
    else:
        assert not fails(environment, truth)


@pytest.mark.parametrize("extras", [{}, {"reward_spec": None}, {"reward_spec": "4"}, {"reward_spec": {}}])
def test_rows_without_a_ground_truth(extras: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"needs a ground truth.*data\.response_column"):
        row_requirements(EnvironmentConfig(reward_function={"boxed_math": 1.0}), ("train",), 1)["check"]("", extras, "")


def test_evaluation_has_needs_of_its_own() -> None:
    environment = EnvironmentConfig(env_class="mine:Own", eval_reward_function={"gsm8k": 1.0})
    assert not fails(environment, None)
    assert fails(environment, "forty-two", "eval")
    required = "env_class_required"
    assert row_requirements(environment, ("train",), 1)[required]
    assert row_requirements(environment, ("train", "eval"), 1)[required]
    assert not row_requirements(environment, ("eval",), 1)[required]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"env_class": "countdown", "nums": [1, 2]}, r"row uid 0: countdown: the row needs a column `target`"),
        ({"env_class": "cuontdown"}, r"row uid 0: unknown environment 'cuontdown'; did you mean countdown"),
        ({"env_class": "gsm8k"}, r"row uid 0: the row needs a ground truth"),
        ({"env_class": "countdown", "nums": [1, 2], "target": 3}, None),
        ({"env_class": "format"}, None),
        ({"env_class": "not_installed_here:Own"}, None),
        ({"env_class": "not_installed_here:Further"}, None),
        (
            {"env_class": "subprocess:Popen"},
            r"rows\.jsonl, row uid 0: environment 'subprocess:Popen' is not one that the conf",
        ),
        ({"env_class": "not_installed_here:own"}, r"environment\.allowed_env_classes = \[\"not_installed_here:own\"\]"),
    ],
)
def test_rows_are_tried_on_their_environment(tmp_path: Path, row: dict[str, Any], told: str | None) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "?", **row}))

    def load(environment: EnvironmentConfig) -> None:
        load_dataset([Source(str(tmp_path / "rows.jsonl"))], ("train",), DataConfig(train_data=[]), environment, 1)

    load(EnvironmentConfig(reward_function={"format": 1.0}))  # which pays in the place of any environment
    own = EnvironmentConfig(env_class="not_installed_here:Own", allowed_env_classes=["not_installed_here:Further"])
    if told is None:
        load(own)
    else:
        with pytest.raises(DataError, match=told):
            load(own)


def test_rows_name_environments_by_the_names_of_the_configuration(tmp_path: Path) -> None:
    """Prompts have the import path, so that nothing after the reader needs the names."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "?", "env_class": "calc"}\n{"prompt": "?"}\n')

    def load(environment: EnvironmentConfig) -> list[str]:
        sources, data = [Source(str(tmp_path / "rows.jsonl"))], DataConfig(train_data=[])
        return [prompt.env_class for prompt in load_dataset(sources, ("train",), data, environment, 1)]

    names = {"calc": "not_installed_here:Calc", "other": "not_installed_here:Other"}
    assert load(EnvironmentConfig(names=names, env_class="other")) == list(names.values())
    with pytest.raises(DataError, match=r"unknown environment 'calc'; known: .*environment\.names"):
        load(EnvironmentConfig(env_class="format"))


def test_rows_of_the_page_on_data(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    row, program = (
        re.findall(rf"^```{kind}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0] for kind in ("json", "python")
    )
    (tmp_path / "row.jsonl").write_text(row)
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path)
    files = [str(tmp_path / "row.jsonl"), str(tmp_path / "train.jsonl")]
    rows = load_dataset([Source(file) for file in files], ("train",), DataConfig(train_data=[]), EnvironmentConfig(), 1)
    assert [prompt.extras["reward_spec"]["ground_truth"] for prompt in rows] == ["42", "42", "42"]
    assert {prompt.env_class for prompt in rows} == {"gsm8k"}
