"""What configs/hint_number.toml starts from: every number, a game of two roles that each see their own, a model that knows no code."""

from __future__ import annotations

import runpy
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from hpcrl.config import Config
from hpcrl.data.chat.prompt_tokens import ChatTurns
from hpcrl.data.prompts import load_prompts
from hpcrl.data.sources import Source
from hpcrl.launch.submit.preflight import check_files
from tests.paths import CONFIGS

PLACE = CONFIGS / "hint_number"


@pytest.fixture(scope="module")
def make() -> dict[str, Any]:
    return runpy.run_path(str(PLACE / "make.py"))


def test_the_data_are_every_number_and_made_again_the_same(make: dict[str, Any]) -> None:
    config = Config.from_toml([CONFIGS / "hint_number.toml"])
    check_files(config)
    files = [config.data.train_data, config.data.val_data]
    train, validation = ([*load_prompts([Source(one) for one in own], config.environment.env_class)] for own in files)
    assert [prompt.extras["number"] for prompt in validation] == list(range(1, 8))
    assert {prompt.extras["number"] for prompt in train} == set(range(1, 8))
    rows = make["draw_rows"](2, make["TRAIN_ROWS"])
    assert [row["number"] for row in rows] == [prompt.extras["number"] for prompt in train]


def test_the_guesser_sees_the_letter_alone_and_both_are_rewarded(make: dict[str, Any]) -> None:
    game = make["game"]["HintNumber"]({"number": 3})
    hint = game.step("ce")
    assert (hint.role, hint.fresh, hint.reward, hint.done) == ("hinter", True, 0.0, False)
    assert hint.observations == [{"role": "user", "content": "letter: c"}]
    guess = game.step("3")
    assert (guess.role, guess.reward, guess.rewards, guess.done) == ("guesser", 1.0, {"hinter": 1.0}, True)
    silent = make["game"]["HintNumber"]({"number": 3})
    assert silent.step("7").observations == [{"role": "user", "content": "letter: a"}]
    assert silent.step("4").rewards == {"hinter": 0.0}


def test_the_start_model_knows_the_words_and_no_code(make: dict[str, Any]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(PLACE / "model")
    assert tokenizer.get_vocab() == make["make_tokenizer"]().get_vocab()
    opening = ChatTurns(tokenizer, {}).opening([{"role": "user", "content": "letter: g"}]).token_ids
    assert len(opening) == 5
    model = AutoModelForCausalLM.from_pretrained(PLACE / "model")
    assert make["score"](model, tokenizer) == pytest.approx(1 / 7)
    assert (PLACE / "model" / "model.safetensors").stat().st_size <= 2 << 20
