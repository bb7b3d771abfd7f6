"""What the quickstart ships: data with right answers, a tokenizer that loads as it was made, a model that has much to learn."""

import importlib.util

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from hpcrl.config import Config
from hpcrl.data.prompts import load_prompts
from hpcrl.data.sources import Source
from hpcrl.envs.registry import make_environment
from tests.paths import CONFIGS

MODEL = CONFIGS / "quickstart" / "model"


@pytest.fixture(scope="module")
def make():
    spec = importlib.util.spec_from_file_location("quickstart_make", CONFIGS / "quickstart" / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def config():
    return Config.from_toml([CONFIGS / "quickstart.toml"])


@pytest.fixture(scope="module")
def prompts(config):
    return [
        load_prompts([Source(file) for file in files], None) for files in (config.data.train_data, config.data.val_data)
    ]


def word(prompt) -> str:
    return prompt.messages[0]["content"].removeprefix("sort: ")


def test_answers_are_right_and_pay(prompts):
    for prompt in [*prompts[0][:100], *prompts[1]]:
        answer = "".join(sorted(word(prompt)))
        assert make_environment(prompt.env_class, prompt.extras).step(answer).reward == 1.0


def test_validation_words_are_not_trained(prompts):
    train, validation = ({word(prompt) for prompt in rows} for rows in prompts)
    assert (len(train), len(validation)) == (8192, 256)
    assert not train & validation


def test_making_the_data_again_gives_the_same(make, prompts, tmp_path):
    validation = make.draw_words(1, make.VALIDATION_ROWS)
    make.write_rows(tmp_path / "train.parquet", make.draw_words(2, make.TRAIN_ROWS, frozenset(validation)))
    make.write_rows(tmp_path / "validation.parquet", validation)
    again = [load_prompts([Source(str(tmp_path / f"{name}.parquet"))], None) for name in ("train", "validation")]
    assert again == prompts


def test_tokenizer_has_one_token_per_letter(make, prompts, config):
    tokenizer, made = AutoTokenizer.from_pretrained(MODEL), make.make_tokenizer()
    assert tokenizer.get_vocab() == made.get_vocab()
    for prompt in prompts[1]:
        ids = tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True, return_dict=False)
        assert tokenizer.decode(ids) == f"<|user|>sort: {word(prompt)}<|end|><|assistant|>"
        assert len(ids) == 9 <= config.trainer.max_prompt_length
    answer = [*tokenizer("abcdg").input_ids, tokenizer.eos_token_id]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "abcdg"
    assert len(answer) == 6 < config.generator.sampling_params.max_generate_length


def test_start_model_sorts_about_a_third(make, prompts):
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    score = make.score(model, AutoTokenizer.from_pretrained(MODEL), [word(prompt) for prompt in prompts[1]])
    assert score == pytest.approx(0.367, abs=0.01)
    assert (MODEL / "model.safetensors").stat().st_size <= 2 << 20


@pytest.mark.parametrize(("passes", "answer"), [(0, "gdbca"), (1, "dbcag"), (2, "bcadg"), (4, "abcdg")])
def test_careless_teacher(make, passes, answer):
    assert make.careless("gdbca", passes) == answer
