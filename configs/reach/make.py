"""Makes everything that configs/reach.toml starts from: the tokenizer, the tiny start model and the two datasets, which are those of configs/reach_vla.toml too.

    python configs/reach/make.py [FOLDER]

The task: turn the two joints of an arm, step by step, until its tip touches a target. The start model has been taught by a lazy teacher,
who mostly leaves a joint alone, sometimes turns it as is right, and otherwise by whatever comes to mind. So it knows what an action is, and
has seen what states are good for, but greedy decoding is lazy too and never moves. Reinforcement learning, which sees nothing but touched or
not touched, has to do better than the teacher.

FOLDER (this one unless told otherwise) receives model/ and data/. Everything comes from fixed seeds on one thread: the data are
the same bytes each time, and on the same kind of machine the weights are too. Tokenizer and network are made as the quickstart's.
"""

from __future__ import annotations

import random
import runpy
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

JOINTS, TURNS, STATE_BINS, ACTION_BINS, LARGEST_TURN = 2, 6, 16, 5, 0.5  # the last as a share of pi
INSTRUCTION = "reach: "
LAZY, RIGHT = 0.5, 0.2
SPACE = "Ġ"  # as byte-level tokenizers write it
TRAIN_ROWS, VALIDATION_ROWS, FIRST_VALIDATION = 4096, 128, 1_000_000
EPISODES, SUPERVISED_STEPS, SUPERVISED_BATCH, SUPERVISED_LR = 8192, 400, 64, 3e-3

quickstart: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[1] / "quickstart" / "make.py"))


def make_tokenizer() -> Qwen2Tokenizer:
    """Return a tokenizer with one token per number, per space, for the instruction and per chat marker."""
    return quickstart["make_tokenizer"](f"{SPACE}0123456789", (INSTRUCTION, *map(str, range(10, STATE_BINS))))


def write_rows(path: Path, seeds: range) -> None:
    prompt = [{"role": "user", "content": INSTRUCTION}]
    rows = [{"data_source": "reach", "prompt": prompt, "env_class": "robot", "seed": seed} for seed in seeds]
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def move(state: int, source: random.Random) -> int:
    """Return how the lazy teacher moves a joint that is this far away."""
    way = source.random()
    if way < LAZY:
        return ACTION_BINS // 2
    if way < LAZY + RIGHT:
        share = (2 * (state + 0.5) / STATE_BINS - 1) / LARGEST_TURN
        return min(max(int((share + 1) * ACTION_BINS / 2), 0), ACTION_BINS - 1)
    return source.randrange(ACTION_BINS)


def play(source: random.Random) -> list[dict[str, str]]:
    """Return a conversation of the lazy teacher; states do not follow from actions, since none is learned."""
    said: list[dict[str, str]] = []
    for turn in range(TURNS):
        states = [source.randrange(STATE_BINS) for _ in range(JOINTS)]
        told = " ".join(map(str, states))
        said += [
            {"role": "user", "content": told if turn else INSTRUCTION + told},
            {"role": "assistant", "content": " ".join(str(move(state, source)) for state in states)},
        ]
    return said


def learn(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer) -> None:
    """Take a few supervised steps on the teacher's actions, with a cosine-decayed learning rate."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=SUPERVISED_LR)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, SUPERVISED_STEPS)
    source = random.Random(4)
    ids = torch.tensor([tokenizer.apply_chat_template(play(source), return_dict=False) for _ in range(EPISODES)])
    speaking = tokenizer.convert_tokens_to_ids("<|assistant|>")
    said = torch.zeros_like(ids, dtype=torch.bool)
    for back in range(1, 2 * JOINTS + 1):  # numbers, spaces between them and the end marker
        said[:, back:] |= ids[:, :-back] == speaking
    for step in range(SUPERVISED_STEPS):
        rows = torch.arange(step * SUPERVISED_BATCH, (step + 1) * SUPERVISED_BATCH) % EPISODES
        logits, answers = model(ids[rows]).logits[:, :-1], said[rows, 1:]
        loss = torch.nn.functional.cross_entropy(logits[answers], ids[rows, 1:][answers])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    print(f"{model.num_parameters()} parameters, loss {loss:.3f} nats per token of an action")


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    write_rows(folder / "data" / "train.parquet", range(TRAIN_ROWS))
    write_rows(folder / "data" / "validation.parquet", range(FIRST_VALIDATION, FIRST_VALIDATION + VALIDATION_ROWS))
    tokenizer = make_tokenizer()
    model = quickstart["make_model"](tokenizer)
    learn(model, tokenizer)
    tokenizer.save_pretrained(folder / "model")
    model.save_pretrained(folder / "model")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
