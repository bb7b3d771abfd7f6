"""Downloads GSM8K and writes the rows of the recipes: python configs/recipes/gsm8k.py [FOLDER]

FOLDER, by default data/gsm8k beside this file, gets train.jsonl and test.jsonl. The files are those of openai/gsm8k on the hub, whose
main subset has the columns question and answer; rows.py makes rows of them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from huggingface_hub import hf_hub_download
from rows import gsm8k, published

DATASET = "openai/gsm8k"
SPLITS = ("train", "test")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).parent / "data" / "gsm8k")
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        file = hf_hub_download(DATASET, f"main/{split}-00000-of-00001.parquet", repo_type="dataset")
        lines = [json.dumps(gsm8k(row), ensure_ascii=False) + "\n" for row in published(Path(file))]
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{folder / f'{split}.jsonl'}: {len(lines):,} rows")


if __name__ == "__main__":
    main()
