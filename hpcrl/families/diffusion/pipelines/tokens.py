"""Tokens of a diffusion policy's rows as text, without the pipeline: its tokenizer is enough."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrl.config.sections.model import Pretrained
from hpcrl.data.tokenizer import read_tokenizer
from hpcrl.errors import DataError
from hpcrl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER = "tokenizer"


def load_tokenizer(model: Pretrained) -> PreTrainedTokenizerBase:
    """Return the first tokenizer of a pipeline. Raises DataError where there is none, here or on the hub."""
    path = Path(model.path).expanduser()
    try:
        if path.is_dir():
            return read_tokenizer(str(path / TOKENIZER))
        return read_tokenizer(model.path, subfolder=TOKENIZER, **model.at_revision)
    except (OSError, ValueError) as error:
        said = " ".join(str(error).split())
        raise DataError(
            f"trainer.policy.model.path: the tokenizer of the pipeline {model} cannot be loaded: {said}"
        ) from error


def row_decoder(model: Pretrained) -> Callable[[list[int]], str]:
    """Return the decoder of rows: of denoising steps, their numbers. Errors as of `load_tokenizer`."""
    tokenizer = load_tokenizer(model)
    vocabulary = len(tokenizer)

    def decode(token_ids: list[int]) -> str:
        text = str(tokenizer.decode([token for token in token_ids if token < vocabulary]))
        steps = [str(token - vocabulary) for token in token_ids if token >= vocabulary]
        return text + (f"denoising steps {', '.join(steps)}" if steps else "")

    return decode


def prompt_counter(model: Pretrained) -> Callable[[Prompt], int]:
    """Return the counter of a prompt's tokens; errors as of `load_tokenizer`."""
    tokenizer = load_tokenizer(model)
    return lambda prompt: len(tokenizer(prompt.messages[-1]["content"]).input_ids)
