"""Writes the rows of the experiment, train.jsonl and validation.jsonl, beside this file: python make_rows.py"""

import json
import random
from pathlib import Path

TRAIN, VALIDATION = 1024, 64


def row(word):
    """Return the row of a task: the prompt, a text or chat messages, and the right answer."""
    return {"prompt": f"sort: {word}", "answer": "".join(sorted(word))}


def main():
    draw, words = random.Random(0), {}
    while len(words) < TRAIN + VALIDATION:
        words["".join(draw.sample("abcdefghijkl", 4))] = None  # each word once
    rows = [json.dumps(row(word)) + "\n" for word in words]
    Path(__file__).with_name("train.jsonl").write_text("".join(rows[:TRAIN]))
    Path(__file__).with_name("validation.jsonl").write_text("".join(rows[TRAIN:]))


if __name__ == "__main__":
    main()
