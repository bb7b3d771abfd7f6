"""What PI0.5 is shown of an observation, and what its numbers mean to the robot."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcrl.config.sections.model import Pretrained
from hpcrl.data.pi05.architecture import folder_of, not_pi05
from hpcrl.errors import ConfigError, DataError
from hpcrl.types import Prompt

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase

STATISTICS = "norm_stats.json"
_BINS = 256
_LEAST = 1e-6


@dataclass(frozen=True)
class Scale:
    """Numbers of a robot between -1 and 1, as the network has them.

    Attributes:
        low, high: [A], what becomes -1 and 1.
    """

    low: np.ndarray
    high: np.ndarray

    @classmethod
    def between(cls, low: np.ndarray, high: np.ndarray, what: str) -> Scale:
        """Return the scale of a simulator's bounds.

        Raises:
            ConfigError: they are not finite.
        """
        import numpy as np

        if not (np.isfinite(low).all() and np.isfinite(high).all()):
            raise ConfigError(
                f"environment.skyrl_gym.robot.simulator: its {what} has no bounds, by which PI0.5 scales it; put openpi's {STATISTICS} beside the model"
            )
        return cls(low, high)

    def of_first(self, count: int, what: str) -> Scale:
        """Return the scale of the first numbers, which are the robot's; models of several robots have more.

        Raises:
            DataError: there are fewer.
        """
        if len(self.low) < count:
            raise DataError(
                f"trainer.policy.model.path: the model's {STATISTICS} has {len(self.low)} numbers of its {what}, and the simulator {count}; it is of another robot"
            )
        return Scale(self.low[:count], self.high[:count])

    def to_network(self, values: np.ndarray) -> np.ndarray:
        return (values - self.low) / (self.high - self.low + _LEAST) * 2 - 1

    def to_robot(self, values: np.ndarray) -> np.ndarray:
        return (values + 1) / 2 * (self.high - self.low + _LEAST) + self.low


def statistics_files(model: Pretrained) -> list[Path]:
    """Return the file of the robot's statistics, alone; empty: there is none.

    Raises:
        DataError: there are several.
    """
    folder = folder_of(model)
    found = [path for path in (folder / STATISTICS, *sorted(folder.glob(f"assets/**/{STATISTICS}"))) if path.is_file()]
    if len(found) > 1:
        raise DataError(
            f"trainer.policy.model.path: {folder} has several {STATISTICS}, such as {found[0]} and {found[1]}; keep the robot's own"
        )
    return found


def statistics_of(model: Pretrained) -> dict[str, Scale]:
    """Return the scales of `state` and `actions` that openpi's norm_stats.json beside the model has: the quantiles 0.01 and 0.99; empty: there is none.

    Raises:
        DataError: it is not such.
    """
    import numpy as np

    if not (found := statistics_files(model)):
        return {}
    try:
        entries: Mapping[str, Any] = json.loads(found[0].read_text())["norm_stats"]
        return {
            name: Scale(np.array(entries[name]["q01"], float), np.array(entries[name]["q99"], float))
            for name in ("state", "actions")
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{found[0]} has no quantiles of state and actions as openpi writes them ({error!r})"
        ) from error


def written_prompt(task: str, state: np.ndarray | None) -> str:
    """Return the text of a turn, as openpi writes it.

    Args:
        task: what is to be done.
        state: [D] from -1 to 1, written as the numbers of 256 bins; None: it is not told.
    """
    import numpy as np

    if state is None:
        return f"{_cleaned(task)}\n"
    bins = np.digitize(state, np.linspace(-1, 1, _BINS + 1)[:-1]) - 1
    return f"Task: {_cleaned(task)}, State: {' '.join(map(str, bins))};\nAction: "


def _cleaned(task: str) -> str:
    return task.strip().replace("_", " ").replace("\n", " ")


def resized(image: np.ndarray, size: int) -> np.ndarray:
    """Return an image [size, size, 3] uint8: as large as fits, in the middle of black."""
    import numpy as np
    from PIL import Image

    height, width = image.shape[:2]
    scale = size / max(height, width)
    inner = Image.fromarray(image).resize(
        (max(1, round(width * scale)), max(1, round(height * scale))), Image.Resampling.BILINEAR
    )
    found = Image.new("RGB", (size, size))
    found.paste(inner, ((size - inner.width) // 2, (size - inner.height) // 2))
    return np.asarray(found)


def load_tokenizer(model: Pretrained) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model.

    Raises:
        DataError: there is none.
    """
    from transformers import AutoTokenizer

    folder: Path = folder_of(model)
    try:
        return AutoTokenizer.from_pretrained(str(folder))
    except (OSError, ValueError) as error:
        raise not_pi05(model, f"its tokenizer, PaliGemma's: {error}") from error


def prompt_counter(model: Pretrained) -> Callable[[Prompt], int]:
    """Return what counts the tokens of a prompt, without those of a state; errors as of `load_tokenizer`."""
    tokenizer = load_tokenizer(model)
    return lambda prompt: len(tokenizer(_cleaned(prompt.messages[-1]["content"])).input_ids)


def row_decoder(model: Pretrained) -> Callable[[list[int]], str]:
    """Return what turns the tokens of rows into text: of actions, their places in the chunk. Errors as of `load_tokenizer`."""
    tokenizer = load_tokenizer(model)
    vocabulary = len(tokenizer)

    def decode(token_ids: list[int]) -> str:
        text = str(tokenizer.decode([token for token in token_ids if token < vocabulary]))
        actions = sum(token >= vocabulary for token in token_ids)
        return text + (f"{actions} actions" if actions else "")

    return decode
