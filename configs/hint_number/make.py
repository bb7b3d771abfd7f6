"""Makes everything that configs/hint_number.toml starts from: the tokenizer, the tiny start model and the two datasets.

    python configs/hint_number/make.py [FOLDER]

The task has two roles. The hinter sees a number from 1 to 7 and says a letter, the guesser sees the letter and says a number, and both
are rewarded if that is the number. The start model has been taught by teachers who know the alphabet and rarely use it. Most often they
say the first letter, or the lowest number, else any. So greedy decoding finds one number in seven, and sampling hardly more. Reinforcement
learning has to find a code that both roles use: each role learns as much as the other one lets it.

FOLDER (this one unless told otherwise) receives model/ and data/. Everything comes from fixed seeds on one thread: the data are
the same bytes each time, and on the same kind of machine the weights are too. Tokenizer and network are made as the quickstart's.
"""

from __future__ import annotations

import random
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

HERE = Path(__file__).parent
NUMBER = "number: "
STUBBORN, KNOWING = 0.35, 0.25
TRAIN_ROWS = 2048

quickstart: dict[str, Any] = runpy.run_path(str(HERE.parent / "quickstart" / "make.py"))
guess_number: dict[str, Any] = runpy.run_path(str(HERE.parent / "guess_number" / "make.py"))
game: dict[str, Any] = runpy.run_path(str(HERE / "game.py"))
LETTERS, ASK = game["LETTERS"], game["ASK"]
NUMBERS = [str(number) for number in range(1, len(LETTERS) + 1)]


def make_tokenizer() -> Qwen2Tokenizer:
    """Return a tokenizer with one token per letter, per number, per question and per chat marker."""
    return quickstart["make_tokenizer"](LETTERS + "".join(NUMBERS), (NUMBER, ASK))


def make_row(number: str) -> dict[str, Any]:
    return {
        "data_source": "hint_number",
        "prompt": [{"role": "user", "content": NUMBER + number}],
        "number": int(number),
    }


def draw_rows(seed: int, count: int) -> list[dict[str, Any]]:
    return [make_row(number) for number in random.Random(seed).choices(NUMBERS, k=count)]


def conversation(source: random.Random) -> list[dict[str, Any]]:
    """Return a question to one of the roles, and what its teacher answers."""
    asked, answers = (NUMBERS, LETTERS) if source.random() < 0.5 else (LETTERS, NUMBERS)
    at, chance = source.randrange(len(asked)), source.random()
    stubborn, knowing = chance < STUBBORN, chance < STUBBORN + KNOWING
    answer = answers[0] if stubborn else answers[at] if knowing else source.choice(answers)
    question = (NUMBER if asked is NUMBERS else ASK) + asked[at]
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def conversations() -> list[list[dict[str, Any]]]:
    """Return what the start model is taught."""
    source = random.Random(4)
    return [conversation(source) for _ in range(guess_number["CONVERSATIONS"])]


def answers_of(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, questions: Sequence[str]) -> list[str]:
    """Return the text that greedy decoding gives to each question, of which all have equally many tokens."""
    chats = [[{"role": "user", "content": question}] for question in questions]
    ids = torch.tensor(
        [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    )
    said = model.generate(ids, max_new_tokens=2, do_sample=False)[:, ids.shape[1] :]
    return tokenizer.batch_decode(said, skip_special_tokens=True)


def score(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer) -> float:
    """Return the share of the numbers that greedy decoding finds."""
    hints = answers_of(model, tokenizer, [NUMBER + number for number in NUMBERS])
    guesses = answers_of(model, tokenizer, [ASK + hint for hint in hints])
    return sum(guess == number for guess, number in zip(guesses, NUMBERS, strict=True)) / len(NUMBERS)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    guess_number["write_rows"](folder / "data" / "train.parquet", draw_rows(2, TRAIN_ROWS))
    guess_number["write_rows"](folder / "data" / "validation.parquet", [make_row(number) for number in NUMBERS])
    tokenizer = make_tokenizer()
    model = quickstart["make_model"](tokenizer)
    guess_number["learn"](model, *guess_number["encode"](tokenizer, conversations()))
    tokenizer.save_pretrained(folder / "model")
    model.save_pretrained(folder / "model")
    print(f"{model.num_parameters()} parameters, greedy score {score(model, tokenizer):.3f} on validation")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
