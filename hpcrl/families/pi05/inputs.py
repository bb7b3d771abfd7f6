"""Inputs of PI0.5 from an observation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrl.config.sections.model import Pretrained
from hpcrl.data.tokenizer import read_tokenizer
from hpcrl.families.pi05.architecture import folder_of, not_pi05
from hpcrl.types import Prompt

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase

_BINS = 256


def written_prompt(task: str, state: np.ndarray | None) -> str:
    """Return the text of a turn, as openpi writes it.

    Args:
        task: what is to be done.
        state: [D] from -1 to 1, written as the numbers of 256 bins; None: it is left out.
    """
    import numpy as np

    if state is None:
        return f"{_cleaned(task)}\n"
    bins = np.digitize(state, np.linspace(-1, 1, _BINS + 1)[:-1]) - 1
    return f"Task: {_cleaned(task)}, State: {' '.join(map(str, bins))};\nAction: "


def _cleaned(task: str) -> str:
    return task.strip().replace("_", " ").replace("\n", " ")


def resized(image: np.ndarray, size: int) -> np.ndarray:
    """Return an image [size, size, 3] uint8: as large as fits, in the middle of black; as openpi, whose sides are cut to whole pixels."""
    import numpy as np
    from PIL import Image

    height, width = image.shape[:2]
    ratio = max(width, height) / size
    sides = max(1, int(width / ratio)), max(1, int(height / ratio))
    inner = Image.fromarray(image).resize(sides, Image.Resampling.BILINEAR)
    found = Image.new("RGB", (size, size))
    found.paste(inner, ((size - inner.width) // 2, (size - inner.height) // 2))
    return np.asarray(found)


def load_tokenizer(model: Pretrained) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model. Raises DataError where there is none."""
    folder: Path = folder_of(model)
    try:
        return read_tokenizer(str(folder))
    except (OSError, ValueError) as error:
        raise not_pi05(model, f"its tokenizer, PaliGemma's: {error}") from error


def prompt_counter(model: Pretrained) -> Callable[[Prompt], int]:
    """Return the counter of a prompt's tokens, without those of a state; errors as of `load_tokenizer`."""
    tokenizer = load_tokenizer(model)
    return lambda prompt: len(tokenizer(_cleaned(prompt.messages[-1]["content"])).input_ids)


def row_decoder(model: Pretrained) -> Callable[[list[int]], str]:
    """Return the decoder of rows: of actions, their places in the chunk. Errors as of `load_tokenizer`."""
    tokenizer = load_tokenizer(model)
    vocabulary = len(tokenizer)

    def decode(token_ids: list[int]) -> str:
        text = str(tokenizer.decode([token for token in token_ids if token < vocabulary]))
        actions = sum(token >= vocabulary for token in token_ids)
        return text + (f"{actions} actions" if actions else "")

    return decode
