"""What configs/fix_line.toml starts from: rows whose tests only the right operator passes, and a model that knows the calls of its tools."""

from __future__ import annotations

import json
import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from hpcrl.config import Config
from hpcrl.data.chat.prompt_tokens import ChatTurns
from hpcrl.envs.terminal.calls import first_call
from hpcrl.envs.terminal.tools import asked
from hpcrl.launch.submit.preflight import check_files
from tests.paths import CONFIGS

PLACE = CONFIGS / "fix_line"


@pytest.fixture(scope="module")
def make() -> dict[str, Any]:
    return runpy.run_path(str(PLACE / "make.py"))


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (PLACE / "data" / f"{name}.jsonl").read_text().splitlines()]


def test_only_the_right_operator_passes_the_tests_of_a_row(make: dict[str, Any], tmp_path: Path) -> None:
    validation = rows("validation")
    assert validation == make["rows_of"](make["VALIDATION_NUMBERS"])
    assert not {row["task"] for row in validation} & {row["task"] for row in rows("train")}
    for row in validation:
        word, number = row["task"].split("-")
        passed = set[str]()
        for operator in make["OPERATORS"].values():
            (tmp_path / make["FILE"]).write_text(make["LINE"].format(operator=operator, number=number) + "\n")
            command = ["sh", "-c", row["tests"]["command"]]
            if subprocess.run(command, cwd=tmp_path, check=False).returncode == 0:
                passed.add(operator)
        assert passed == {make["OPERATORS"][word]}
        assert make["LINE"].format(operator=make["OPERATORS"][word], number=number) not in str(row["files"])


def test_the_start_model_knows_the_calls_and_one_operator(make: dict[str, Any]) -> None:
    config = Config.from_toml([CONFIGS / "fix_line.toml"])
    check_files(config)
    tokenizer = AutoTokenizer.from_pretrained(PLACE / "model")
    assert tokenizer.get_vocab() == make["make_tokenizer"]().get_vocab()
    request, look, seen, edit = (message["content"] for message in make["conversation"]("times", 4, "-", "*"))
    assert asked(first_call(look) or "") == ("view", {"path": "f.sh"})
    assert asked(first_call(edit) or "") == ("edit", {"path": "f.sh", "old": "-", "new": "*"})
    written = [tokenizer(text).input_ids for text in (look, edit)]
    assert max(map(len, written)) < config.generator.sampling_params.max_generate_length
    opening = ChatTurns(tokenizer, {}).opening([{"role": "user", "content": request}]).token_ids
    assert tokenizer.decode(opening) == f"<|user|>{request}<|end|><|assistant|>"
    assert tokenizer.decode(tokenizer(seen).input_ids) == "1  echo $(($1-4))"
    model = AutoModelForCausalLM.from_pretrained(PLACE / "model")
    assert make["score"](model, tokenizer) == pytest.approx(1 / 3)
    assert (PLACE / "model" / "model.safetensors").stat().st_size <= 1 << 20
