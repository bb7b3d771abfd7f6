"""Makes everything that configs/guess_number.toml starts from: the tokenizer, the tiny start model and the two datasets.

    python configs/guess_number/make.py [FOLDER]

The task: find one of seven numbers in three guesses, by the answers `Higher.` and `Lower.`; halving the range always finds it. The
start model has been taught by a stubborn teacher: every fourth guess is the lowest number, whatever was answered, and the others are
any that the answers leave. So it knows what a guess is and has seen what answers are good for, but greedy decoding is stubborn too and
finds hardly one number in seven. Reinforcement learning, which sees nothing but found or not found, has to do better than the teacher.

FOLDER (this one unless told otherwise) receives model/ and data/. Everything comes from fixed seeds on one thread: the data are
the same bytes each time, and on the same kind of machine the weights are too. Tokenizer and network are made as the quickstart's.
"""

from __future__ import annotations

import json
import random
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

from hpcrl.envs.tasks.guess_number import HIGHER, LOWER, GuessNumber

LOWEST, NUMBERS, GUESSES = (1, 8), 7, 3
INSTRUCTION, TO = "guess: ", " to "
LARGEST = LOWEST[-1] + NUMBERS - 1
PHRASES = (INSTRUCTION, TO, HIGHER, LOWER, "Say a whole number from ", ".", *map(str, range(10, LARGEST + 1)))
STUBBORN = 0.25
TRAIN_ROWS = 4096
CONVERSATIONS, SUPERVISED_STEPS, SUPERVISED_BATCH, SUPERVISED_LR = 8192, 500, 128, 3e-3

quickstart: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[1] / "quickstart" / "make.py"))


def make_tokenizer() -> Qwen2Tokenizer:
    """Return a tokenizer with one token per number, per word of the conversation and per chat marker."""
    return quickstart["make_tokenizer"]("0123456789", PHRASES)


def make_row(low: int, secret: int) -> dict[str, Any]:
    high = low + NUMBERS - 1
    return {
        "data_source": "guess_number",
        "prompt": [{"role": "user", "content": f"{INSTRUCTION}{low}{TO}{high}"}],
        "env_class": "guess_number",
        "low": low,
        "high": high,
        "reward_spec": {"method": "rule", "ground_truth": str(secret)},
    }


def all_rows() -> list[dict[str, Any]]:
    """Return each number of each range once, so that a mean over them is the share that a policy finds."""
    return [make_row(low, secret) for low in LOWEST for secret in range(low, low + NUMBERS)]


def draw_rows(seed: int, count: int) -> list[dict[str, Any]]:
    source = random.Random(seed)
    return [make_row(low, low + source.randrange(NUMBERS)) for low in source.choices(LOWEST, k=count)]


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path)


def play(row: dict[str, Any], source: random.Random) -> list[dict[str, str]]:
    """Return a conversation of the stubborn teacher, which ends with the last guess."""
    environment, messages = GuessNumber(row), list(row["prompt"])
    low, high = row["low"], row["high"]
    for _ in range(GUESSES):
        guess = row["low"] if source.random() < STUBBORN else source.randint(low, high)
        turn = environment.step(str(guess))
        messages += [{"role": "assistant", "content": str(guess)}, *turn.observations]
        if turn.done:
            return messages
        if turn.observations[0]["content"] == HIGHER:
            low = max(low, guess + 1)
        else:
            high = min(high, guess - 1)
    return messages[:-1]


def encode(
    tokenizer: Qwen2Tokenizer, conversations: Sequence[list[dict[str, Any]]], **template: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids [B, T], padded at the end, and which of them the policy would have said, its end markers included."""
    encoded = [tokenizer.apply_chat_template(chat, return_dict=False, **template) for chat in conversations]
    ids = torch.full((len(encoded), max(map(len, encoded))), tokenizer.pad_token_id)
    for row, one in zip(ids, encoded, strict=True):
        row[: len(one)] = torch.tensor(one)
    speaking = tokenizer.convert_tokens_to_ids("<|assistant|>")
    said = torch.zeros_like(ids, dtype=torch.bool)
    for at in range(1, ids.shape[1]):
        goes_on = said[:, at - 1] & (ids[:, at - 1] != tokenizer.eos_token_id)
        said[:, at] = goes_on | (ids[:, at - 1] == speaking)
    return ids, said


def conversations() -> list[list[dict[str, Any]]]:
    """Return what the start model is taught."""
    source = random.Random(4)
    return [play(row, source) for row in draw_rows(3, CONVERSATIONS)]


def learn(model: Qwen2ForCausalLM, ids: torch.Tensor, said: torch.Tensor) -> None:
    """Take a few supervised steps on what a teacher said, as `encode` returns it, with a cosine-decayed learning rate."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=SUPERVISED_LR)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, SUPERVISED_STEPS)
    for step in range(SUPERVISED_STEPS):
        rows = torch.arange(step * SUPERVISED_BATCH, (step + 1) * SUPERVISED_BATCH) % CONVERSATIONS
        logits, answers = model(ids[rows]).logits[:, :-1], said[rows, 1:]
        loss = torch.nn.functional.cross_entropy(logits[answers], ids[rows, 1:][answers])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


@torch.no_grad()
def score(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer) -> float:
    """Return the share of all numbers that greedy decoding finds."""
    found = 0.0
    for row in all_rows():
        environment, messages = GuessNumber(row), list(row["prompt"])
        for _ in range(GUESSES):
            ids = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=False
            )
            said = model.generate(ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :]
            text = tokenizer.decode(said, skip_special_tokens=True)
            turn = environment.step(text)
            found += turn.reward
            if turn.done:
                break
            messages += [{"role": "assistant", "content": text}, *turn.observations]
    return found / len(all_rows())


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    write_rows(folder / "data" / "train.parquet", draw_rows(2, TRAIN_ROWS))
    write_rows(folder / "data" / "validation.parquet", all_rows())
    of_agent = [json.dumps({**row, "env_class": "agent"}) for row in all_rows()]
    (folder / "data" / "agent.jsonl").write_text("\n".join(of_agent) + "\n")
    tokenizer = make_tokenizer()
    model = quickstart["make_model"](tokenizer)
    learn(model, *encode(tokenizer, conversations()))
    tokenizer.save_pretrained(folder / "model")
    model.save_pretrained(folder / "model")
    print(f"{model.num_parameters()} parameters, greedy score {score(model, tokenizer):.3f} on validation")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
