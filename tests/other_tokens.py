"""A model whose tokens are not the quickstart's."""

from __future__ import annotations

import runpy
from itertools import pairwise
from pathlib import Path

import torch
from tokenizers import AddedToken
from transformers import Qwen2Tokenizer

from tests.paths import QUICKSTART


def write_other_tokens(path: Path) -> None:
    """Write a model with random weights. It has tokens of two letters, other ids and another end of a text."""
    made = runpy.run_path(str(QUICKSTART.parent / "quickstart" / "make.py"))
    letters, end = made["ALPHABET"], "<|stop|>"
    pairs = [(one, other) for one, other in pairwise(letters) if letters.index(one) % 2 == 0]
    tokens = [made["PAD"], *made["ROLES"], *reversed(letters), *map("".join, pairs), end]
    tokenizer = Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=pairs,
        unk_token=None,
        pad_token=made["PAD"],
        eos_token=end,
        extra_special_tokens=made["ROLES"],
        chat_template=made["TEMPLATE"].replace(made["END"], end),
        model_max_length=256,
    )
    tokenizer.add_tokens([AddedToken(made["INSTRUCTION"], normalized=False)])
    torch.manual_seed(0)
    made["make_model"](tokenizer).save_pretrained(path)
    tokenizer.save_pretrained(path)
