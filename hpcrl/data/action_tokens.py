"""Actions as tokens (OpenVLA, arXiv:2406.09246, section 3.2): the last ids of a vocabulary stand for bins between -1 and 1. Without torch.

Letters for shapes: K actions, A numbers of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from hpcrl.errors import DataError

if TYPE_CHECKING:
    import numpy as np

_BINS, _STATISTICS = "n_action_bins", "norm_stats"
_BOUNDS = {"bounds_q99": ("q01", "q99"), "bounds": ("min", "max")}
_LEAST = 1e-8  # OpenVLA-OFT adds it, of numbers that never change


@dataclass(frozen=True)
class ActionTokens:
    """The ids that say numbers: id `end` - n is bin n, counted from 1 at -1.

    As in OpenVLA there is an id for each edge of the bins, which are one fewer: the last two ids mean the last bin.

    Attributes:
        end: the id behind the last of them.
        count: of them; 2 at least.
    """

    end: int
    count: int

    @property
    def ids(self) -> range:
        return range(self.end - self.count, self.end)

    def numbers(self, token_ids: Sequence[int]) -> np.ndarray:
        """Return the middles of the bins of tokens, [T] float64 from -1 to 1."""
        import numpy as np

        edges = np.linspace(-1.0, 1.0, self.count)
        at = np.clip(self.end - np.asarray(token_ids) - 1, 0, self.count - 2)
        return ((edges[:-1] + edges[1:]) / 2)[at]

    def tokens(self, numbers: np.ndarray) -> list[int]:
        """Return the tokens of numbers [T], those beyond -1 and 1 taken back to them."""
        import numpy as np

        edges = np.linspace(-1.0, 1.0, self.count)
        return (self.end - np.digitize(np.clip(numbers, -1.0, 1.0), edges)).tolist()


def action_tokens(config: Any) -> ActionTokens | None:
    """Return the action tokens of a model, by its configuration or the entries of its config.json; None: it writes text.

    `n_action_bins` there says how many they are; OpenVLA's vocabulary ends before `pad_to_multiple_of` ids that mean nothing.
    """
    entries = config if isinstance(config, Mapping) else vars(config)
    count, text = entries.get(_BINS), entries.get("text_config")
    if not isinstance(count, int) or count < 2:
        return None
    of_text = entries if text is None else text if isinstance(text, Mapping) else vars(text)
    return ActionTokens(int(of_text.get("vocab_size", 0)) - int(entries.get("pad_to_multiple_of") or 0), count)


@dataclass(frozen=True)
class Scale:
    """Between numbers of a network and those of a robot, by statistics of the data that the network has learned from.

    Attributes:
        low, high: [A], what -1 and 1 stand for.
        scaled: [A] bool; the other numbers, such as a gripper's, stay as they are.
    """

    low: np.ndarray
    high: np.ndarray
    scaled: np.ndarray

    def actions(self, numbers_KA: np.ndarray) -> np.ndarray:
        """Convert the network's numbers [K, A] to actions of the robot."""
        import numpy as np

        return np.where(self.scaled, (numbers_KA + 1) / 2 * (self.high - self.low) + self.low, numbers_KA)

    def state(self, measured_A: np.ndarray) -> np.ndarray:
        """Convert measurements of the robot to the network's numbers, [A] within -1 and 1."""
        import numpy as np

        share = (measured_A - self.low) / (self.high - self.low + _LEAST)
        return np.where(self.scaled, 2 * share - 1, measured_A).clip(-1, 1)


def scale_of(
    config: Any, key: str | None, norm_type: str = "bounds_q99", what: Literal["action", "proprio"] = "action"
) -> Scale | None:
    """Return the scale of a dataset from a model's `norm_stats`; None: the model has no statistics.

    Args:
        config: as of `action_tokens`.
        key: of the dataset; None: there is one at most.
        norm_type: as of vla.norm_type.
        what: of the robot: what it does, or what is measured of it.

    Raises:
        DataError: there is no such dataset, several, or its statistics are not such.
    """
    import numpy as np

    entries = config if isinstance(config, Mapping) else vars(config)
    known = entries.get(_STATISTICS) or {}
    if key is None and len(known) < 2:
        key = next(iter(known), None)
        if key is None:
            return None
    if key not in known:
        raise DataError(
            f"vla.unnorm_key: {f'found {key!r}' if key else 'required'}; the model's config.json has statistics of "
            f"{', '.join(sorted(known)) or 'no dataset, so leave it out'}"
        )
    found = known[key].get(what, {}) if isinstance(known[key], Mapping) else {}
    of_low, of_high = _BOUNDS[norm_type]
    try:
        low, high = np.array(found[of_low], np.float64), np.array(found[of_high], np.float64)
        scaled = np.array(found.get("mask", [True] * len(low)), bool)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"vla.unnorm_key: the statistics of {key} lack {of_low} or {of_high} of `{what}` ({error!r}), which vla.norm_type={norm_type} reads"
        ) from error
    if not low.shape == high.shape == scaled.shape:
        raise DataError(
            f"vla.unnorm_key: {of_low}, {of_high} and mask of {key} have {low.shape}, {high.shape} and {scaled.shape} numbers"
        )
    return Scale(low, high, scaled)
