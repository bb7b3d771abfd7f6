"""Turns published datasets into rows for the recipes: python configs/recipes/rows.py KIND FILE > ROWS.jsonl

FILE is a Parquet or JSON-lines file with the columns of the kind:
  gsm8k   question, answer                        openai/gsm8k
  dapo    prompt, reward_model.ground_truth       BytedTsinghua-SIA/DAPO-Math-17k and BytedTsinghua-SIA/AIME-2024
  search  question, golden_answers                PeterJinGo/nq_hotpotqa_train

DAPO's files repeat each problem many times: it is printed once.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def gsm8k(row: Row) -> Row:
    instruction = "Think step by step. End with `#### ` and the number."
    return _row(f"{row['question']}\n\n{instruction}", row["answer"])


def dapo(row: Row) -> Row:
    return {"prompt": row["prompt"], "reward_spec": {"ground_truth": row["reward_model"]["ground_truth"]}}


def search(row: Row) -> Row:
    instruction = (
        "Answer the question. Think first. If you need to look something up, write <search>your query</search>: you will be shown "
        "documents between <information> and </information>, and may search again. Give the answer, without explanation, as "
        "<answer>your answer</answer>."
    )
    return _row(f"{instruction}\n\nQuestion: {row['question']}", {"target": list(row["golden_answers"])})


def _row(content: str, truth: object) -> Row:
    return {"prompt": [{"role": "user", "content": content}], "reward_spec": {"ground_truth": truth}}


KINDS: dict[str, Callable[[Row], Row]] = {"gsm8k": gsm8k, "dapo": dapo, "search": search}


def published(path: Path) -> Iterator[Row]:
    if path.suffix == ".parquet":
        from pyarrow import parquet

        for batch in parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    else:
        with path.open(encoding="utf-8") as lines:
            yield from map(json.loads, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()
    rows = (json.dumps(KINDS[arguments.kind](row), ensure_ascii=False) for row in published(arguments.file))
    for row in dict.fromkeys(rows):
        print(row)


if __name__ == "__main__":
    main()
