"""The command line of `hpcrl eval`: which words are files, which are settings, and in which order they come."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.cli.main import main
from tests.paths import CONFIGS, QUICKSTART

Output = pytest.CaptureFixture[str]
MODEL = CONFIGS / "quickstart" / "model"


def said(words: list[str], capsys: Output) -> str:
    """Return what the command refuses."""
    assert main(["eval", *words]) != 0
    return capsys.readouterr().err


@pytest.mark.parametrize("option", ["--data", "--config"])
def test_an_override_without_a_value_is_said_behind_an_option_of_several_words_too(option: str, capsys: Output) -> None:
    files = {"--data": ["--data", "none.jsonl"], "--config": ["--data", "none.jsonl", "--config", str(QUICKSTART)]}
    error = said([str(MODEL), *files[option], "trainer.run_name="], capsys)
    assert error.startswith("hpcrl: trainer.run_name= has no value and goes back to its default, unset\n")
    assert "none.jsonl" in error.partition("\n")[2]


@pytest.mark.parametrize("option", ["--data", "--config"])
def test_what_an_option_has_swallowed_is_named_with_the_right_order(option: str, capsys: Output) -> None:
    files = ["--data", "a.jsonl"] if option == "--config" else []
    error = said([*files, option, "b", str(MODEL)], capsys)
    assert "RUN|MODEL comes first" in error
    assert str(MODEL) in error
    assert "hpcrl eval RUN|MODEL [KEY=VALUE …] --data FILE …" in error


def test_settings_alone_are_no_data(capsys: Output) -> None:
    error = said([str(MODEL), "--data", "trainer.seed=3"], capsys)
    assert error.startswith("hpcrl: --data: expected a dataset of prompts, found settings alone, trainer.seed=3;")


def test_a_file_whose_name_has_an_equals_sign_is_a_file(tmp_path: Path, capsys: Output) -> None:
    file = tmp_path / "lang=en" / "rows.jsonl"
    file.parent.mkdir()
    file.write_text("{}\n")
    assert "lang=en/rows.jsonl, row uid 0: no column" in said([str(MODEL), "--data", str(file)], capsys)


def test_an_output_that_cannot_be_written_is_no_traceback(capsys: Output) -> None:
    rows = CONFIGS / "quickstart" / "data" / "validation.parquet"
    error = said([str(MODEL), "--data", str(rows), "-o", "/sys/x"], capsys)
    assert error.startswith("hpcrl: /sys/x: ")
    assert error.endswith("; look at its permissions, or name another place\n")
