"""What configs/guess_number.toml starts from: every number of two ranges, a tokenizer for the whole conversation, a stubborn model."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from types import ModuleType

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from hpcrl.config import Config
from hpcrl.data.chat.prompt_tokens import ChatTurns
from hpcrl.data.prompts import load_prompts
from hpcrl.data.sources import Source
from hpcrl.envs.registry import make_environment
from hpcrl.envs.tasks.guess_number import HIGHER, LOWER
from hpcrl.launch.submit.preflight import check_files
from hpcrl.types import Prompt
from tests.paths import CONFIGS

MODEL = CONFIGS / "guess_number" / "model"


@pytest.fixture(scope="module")
def make() -> ModuleType:
    spec = importlib.util.spec_from_file_location("guess_number_make", CONFIGS / "guess_number" / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def config() -> Config:
    found = Config.from_toml([CONFIGS / "guess_number.toml"])
    check_files(found)
    return found


@pytest.fixture(scope="module")
def prompts(config: Config) -> list[list[Prompt]]:
    return [
        load_prompts([Source(file) for file in files], None) for files in (config.data.train_data, config.data.val_data)
    ]


def test_halving_finds_every_number_in_the_turns_there_are(config: Config, prompts: list[list[Prompt]]) -> None:
    for prompt in [*prompts[0][:50], *prompts[1]]:
        environment, low, high = (
            make_environment(prompt.env_class, prompt.extras),
            prompt.extras["low"],
            prompt.extras["high"],
        )
        for _ in range(config.generator.max_turns):
            guess = (low + high) // 2
            turn = environment.step(str(guess))
            if turn.done:
                break
            low, high = (guess + 1, high) if turn.observations[0]["content"] == HIGHER else (low, guess - 1)
        assert turn.reward == 1


def test_validation_has_each_number_once(prompts: list[list[Prompt]]) -> None:
    numbers = [prompt.extras["reward_spec"]["ground_truth"] for prompt in prompts[1]]
    assert numbers == [str(number) for number in range(1, 15)]
    assert {prompt.extras["reward_spec"]["ground_truth"] for prompt in prompts[0]} == set(numbers)


def test_making_the_data_again_gives_the_same(make: ModuleType, prompts: list[list[Prompt]], tmp_path: Path) -> None:
    make.write_rows(tmp_path / "train.parquet", make.draw_rows(2, make.TRAIN_ROWS))
    make.write_rows(tmp_path / "validation.parquet", make.all_rows())
    assert [
        load_prompts([Source(str(tmp_path / f"{name}.parquet"))], None) for name in ("train", "validation")
    ] == prompts


def test_the_whole_conversation_has_tokens_and_fits(
    make: ModuleType, config: Config, prompts: list[list[Prompt]]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    assert tokenizer.get_vocab() == make.make_tokenizer().get_vocab()
    template, prompt = ChatTurns(tokenizer, {}), prompts[1][-1]
    opening = template.opening(prompt.messages).token_ids
    assert tokenizer.decode(opening) == "<|user|>guess: 8 to 14<|end|><|assistant|>"
    assert len(opening) <= config.trainer.max_prompt_length
    longest = make_environment(prompt.env_class, prompt.extras).step("no").observations
    for observations in (longest, *([{"role": "user", "content": text}] for text in (HIGHER, LOWER))):
        following = template.following(observations).token_ids
        assert tokenizer.decode(following) == f"<|user|>{observations[0]['content']}<|end|><|assistant|>"
        said = config.generator.sampling_params.max_generate_length
        assert len(opening) + 2 * (said + len(following)) <= (config.generator.max_input_length or 0)
    for number in range(1, 15):
        assert len(tokenizer(str(number)).input_ids) == 1


def test_the_start_model_is_stubborn(make: ModuleType) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    assert make.score(model, AutoTokenizer.from_pretrained(MODEL)) == pytest.approx(1 / 7)
    assert (MODEL / "model.safetensors").stat().st_size <= 2 << 20


def test_the_teacher_knows_what_answers_are_good_for(make: ModuleType) -> None:
    source, found, rows = random.Random(0), 0, make.draw_rows(1, 500)
    for row in rows:
        messages = make.play(row, source)
        assert messages[-1]["role"] == "assistant"
        found += messages[-1]["content"] == row["reward_spec"]["ground_truth"]
    assert found / len(rows) == pytest.approx(0.53, abs=0.05)
