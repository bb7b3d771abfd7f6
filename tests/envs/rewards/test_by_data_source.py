"""The reward by_data_source, on answers of the form that verl's scores want: right, wrong, and in another form."""

from pathlib import Path

import pytest

from hpcrl.config import EnvironmentConfig
from hpcrl.config.sections.data import DataConfig
from hpcrl.data.datasets import load_dataset
from hpcrl.data.sources import Source
from hpcrl.envs.rewards.response import Response
from hpcrl.envs.rewards.weighted import REWARDS
from hpcrl.errors import DataError
from tests.data.test_prompts import write

GSM8K, MATH, DAPO = "openai/gsm8k", "DigitalLearningGmbH/MATH-lighteval", "math_dapo"


@pytest.mark.parametrize(
    ("data_source", "text", "truth", "expected"),
    [
        (GSM8K, "3 + 4 = 7\n#### 7", "7", 1.0),
        (GSM8K, "#### 1,234", "1234", 1.0),
        (GSM8K, "#### -3", "-3", 1.0),
        (GSM8K, "#### 8", "7", 0.0),
        (GSM8K, "The answer is 7.", "7", 0.0),
        (GSM8K, "#### seven", "7", 0.0),
        (MATH, r"so \boxed{\frac{1}{2}}", r"\frac12", 1.0),
        (MATH, r"so $\boxed{0.5}$", r"\frac{1}{2}", 1.0),
        (MATH, r"\boxed{3} then \boxed{4}", "4", 1.0),
        (MATH, r"\boxed{3}", "4", 0.0),
        (MATH, "the answer is 4", "4", 0.0),
        (MATH, r"\boxed{4", "4", 0.0),
        ("lighteval/MATH", r"\boxed{x^2}", "x^2", 1.0),
        ("HuggingFaceH4/MATH-500", r"\boxed{x^3}", "x^2", 0.0),
        (DAPO, "Answer: 34", "34", 1.0),
        (DAPO, "Answer: 33\nAnswer: $34$", "34", 1.0),
        (DAPO, "answer : 35", "34", -1.0),
        (DAPO, "It is 34.", "34", -1.0),
        ("aime2024", "Answer: 204", "204", 1.0),
        ("math", "Answer: 5 units", "5", 1.0),
    ],
)
def test_a_score_is_that_of_verl(data_source: str, text: str, truth: str, expected: float) -> None:
    response = Response(text=text, ground_truth=truth, data_source=data_source)
    assert REWARDS["by_data_source"](response, EnvironmentConfig()) == expected


def row(data_source: str, truth: str) -> dict[str, object]:
    """Return a row as verl's scripts write it."""
    prompt = [{"role": "user", "content": "?"}]
    return {"data_source": data_source, "prompt": prompt, "reward_model": {"style": "rule", "ground_truth": truth}}


def loaded(path: Path, *rows: dict[str, object]) -> list[str]:
    environment = EnvironmentConfig(reward_function={"by_data_source": 1.0})
    prompts = load_dataset(
        [Source(write(path / "verl.parquet", list(rows)))],
        ["train"],
        DataConfig(train_data=["verl.parquet"]),
        environment,
        1,
    )
    return [prompt.extras["reward_spec"]["ground_truth"] for prompt in prompts]


def test_rows_of_verl_are_read_as_they_are(tmp_path: Path) -> None:
    assert loaded(tmp_path, row(GSM8K, "7"), row(MATH, "x"), row(DAPO, "34")) == ["7", "x", "34"]


@pytest.mark.parametrize(
    ("data_source", "truth", "message"),
    [
        ("hiyouga/geometry3k", "7", "no reward belongs to the data_source 'hiyouga/geometry3k'"),
        (GSM8K, "seven", "expected a number as ground truth"),
    ],
)
def test_a_row_without_a_reward_is_refused_when_it_is_read(
    tmp_path: Path, data_source: str, truth: str, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        loaded(tmp_path, row(GSM8K, "7"), row(data_source, truth))
