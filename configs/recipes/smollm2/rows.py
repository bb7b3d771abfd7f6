"""Makes the rows of the recipe: python configs/recipes/smollm2/rows.py [FOLDER]

FOLDER, by default data beside this file, gets files of JSON lines, the same ones each time. Each prompt shows one solved example:

  addition_train, addition_validation      two numbers from 10 to 99, for GRPO
  sft_train, sft_validation                the same questions with the right answer
  dpo_train, dpo_validation                the same with the right answer and a wrong one
  calculator_train, calculator_validation  products of two numbers from 100 to 999, to be asked of a calculator
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

SEED = 7
TRAIN, VALIDATION = 2048, 128
Row = dict[str, Any]
Pair = tuple[int, int]


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def question(pair: Pair) -> list[dict[str, str]]:
    example = [message("user", "33 + 25"), message("assistant", "33 + 25 = 58")]
    return [message("system", "Add."), *example, message("user", f"{pair[0]} + {pair[1]}")]


def answer(pair: Pair, total: int) -> list[dict[str, str]]:
    return [message("assistant", f"{pair[0]} + {pair[1]} = {total}")]


def addition(pair: Pair) -> Row:
    return {"prompt": question(pair), "reward_spec": {"ground_truth": str(sum(pair))}}


def sft(pair: Pair) -> Row:
    return {"prompt": question(pair), "response": answer(pair, sum(pair))}


def dpo(pair: Pair) -> Row:
    """Return a row whose wrong answer is off by ten, as where a carry is forgotten or made up."""
    wrong = sum(pair) + (-10 if pair[0] % 10 + pair[1] % 10 > 9 else 10)
    return {"prompt": question(pair), "chosen": answer(pair, sum(pair)), "rejected": answer(pair, wrong)}


def calculator(pair: Pair) -> Row:
    messages = [
        message("system", "Use the calculator."),
        message("user", "123 * 456"),
        message("assistant", "calc: 123 * 456"),
        message("tool", "56088"),
        message("assistant", "It is 56088"),
        message("user", f"{pair[0]} * {pair[1]}"),
    ]
    return {"prompt": messages, "reward_spec": {"ground_truth": f"It is {pair[0] * pair[1]}"}}


def drawn(least: int, most: int, count: int) -> list[Pair]:
    """Return different pairs of numbers, in random order."""
    source, pairs = random.Random(SEED), dict[Pair, None]()
    while len(pairs) < count:
        pairs[source.randint(least, most), source.randint(least, most)] = None
    return list(pairs)


def write(path: Path, rows: Iterable[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).parent / "data")
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    kinds: list[tuple[Callable[[Pair], Row], int, int]] = [
        (addition, 10, 99),
        (sft, 10, 99),
        (dpo, 10, 99),
        (calculator, 100, 999),
    ]
    for make, least, most in kinds:
        rows = [make(pair) for pair in drawn(least, most, TRAIN + VALIDATION)]
        write(folder / f"{make.__name__}_train.jsonl", rows[:TRAIN])
        write(folder / f"{make.__name__}_validation.jsonl", rows[TRAIN:])


if __name__ == "__main__":
    main()
