"""Scales of PI0.5's numbers: from statistics beside a model, of openpi or lerobot, or from a simulator's bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcrl.config.sections.model import Pretrained
from hpcrl.data.entries import read_entries
from hpcrl.errors import ConfigError, DataError
from hpcrl.families.pi05.architecture import folder_of
from hpcrl.rundir.commit import leads_outside

if TYPE_CHECKING:
    import numpy as np

STATISTICS = "norm_stats.json"
"""openpi's; where it lies beside the processor of lerobot, it is the one that counts."""
PROCESSOR = "policy_preprocessor.json"
"""lerobot's; it names the file of its statistics."""
_LEROBOT = {"state": "observation.state", "actions": "action"}
_LEAST = 1e-6
_MODEL = "trainer.policy.model.path"


@dataclass(frozen=True)
class NormScale:
    """Numbers of a robot between -1 and 1, as the network has them.

    Attributes:
        low, high: [A], what becomes -1 and 1.
    """

    low: np.ndarray
    high: np.ndarray

    @classmethod
    def between(cls, low: np.ndarray, high: np.ndarray, what: str) -> NormScale:
        """Return the scale of a simulator's bounds. Raises ConfigError where they are not finite."""
        import numpy as np

        if not (np.isfinite(low).all() and np.isfinite(high).all()):
            raise ConfigError(
                f"environment.skyrl_gym.robot.simulator: its {what} has no bounds, by which PI0.5 scales it; put openpi's {STATISTICS} beside the model"
            )
        return cls(low, high)

    def of_first(self, count: int, what: str) -> NormScale:
        """Return the scale of the first numbers, which are the robot's; models of several robots have more.

        Raises:
            DataError: there are fewer.
        """
        if len(self.low) < count:
            raise DataError(
                f"{_MODEL}: the model's statistics have {len(self.low)} numbers of its {what}, and the simulator {count}; they are of another robot"
            )
        return NormScale(self.low[:count], self.high[:count])

    def to_network(self, values: np.ndarray) -> np.ndarray:
        return (values - self.low) / (self.high - self.low + _LEAST) * 2 - 1

    def to_robot(self, values: np.ndarray) -> np.ndarray:
        return (values + 1) / 2 * (self.high - self.low + _LEAST) + self.low


def statistics_files(model: Pretrained) -> list[Path]:
    """Return the files of the robot's statistics; empty: there are none.

    Raises:
        DataError: there are several of openpi's, or lerobot's do not say what hpcrl does with numbers.
    """
    folder = folder_of(model)
    found = [path for path in (folder / STATISTICS, *sorted(folder.glob(f"assets/**/{STATISTICS}"))) if path.is_file()]
    if len(found) > 1:
        raise DataError(
            f"{_MODEL}: {folder} has several {STATISTICS}, such as {found[0]} and {found[1]}; keep the robot's own"
        )
    return found or _lerobot_files(folder)


def statistics_of(model: Pretrained) -> dict[str, NormScale]:
    """Return the scales of `state` and `actions` by the statistics beside the model, the quantiles 0.01 and 0.99; empty: there are none.

    Raises:
        DataError: as `statistics_files`, or they are not such.
    """
    import numpy as np

    if not (found := statistics_files(model)):
        return {}
    try:
        read = _of_openpi(found[0]) if found[0].name == STATISTICS else _of_lerobot(found[1])
        return {name: NormScale(*(np.asarray(each, float) for each in pair)) for name, pair in read.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{_MODEL}: {found[-1]} has no quantiles q01 and q99 of state and actions ({error!r})"
        ) from error


def _of_openpi(file: Path) -> dict[str, tuple[Any, Any]]:
    entries: Mapping[str, Any] = read_entries(file)["norm_stats"]
    return {name: (entries[name]["q01"], entries[name]["q99"]) for name in _LEROBOT}


def _of_lerobot(file: Path) -> dict[str, tuple[Any, Any]]:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        entries = load_file(file)
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    return {name: (entries[f"{own}.q01"], entries[f"{own}.q99"]) for name, own in _LEROBOT.items()}


def _lerobot_files(folder: Path) -> list[Path]:
    """Return lerobot's processor and the file of its statistics; empty: it has none."""
    file = folder / PROCESSOR
    if not file.is_file():
        return []
    try:
        steps: dict[str, dict[str, Any]] = {step.get("registry_name", ""): step for step in read_entries(file)["steps"]}
        normalizer = steps.get("normalizer_processor", {})
        modes = {normalizer["config"]["norm_map"][kind] for kind in ("STATE", "ACTION")} if normalizer else set()
        relative = steps.get("relative_actions_processor", {}).get("config", {}).get("enabled", False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{_MODEL}: {file} is no processor of lerobot ({error!r})") from error
    if relative:
        raise DataError(
            f"{_MODEL}: {file} makes actions relative to the robot's state (relative_actions_processor), and hpcrl does them as they are; take a model that "
            "was trained without use_relative_actions"
        )
    if "state_file" not in normalizer:
        return []
    if modes != {"QUANTILES"}:
        raise DataError(
            f"{_MODEL}: {file} scales state and actions by {' and '.join(sorted(modes))}: expected QUANTILES, PI0.5's own; put openpi's {STATISTICS} of the robot "
            "beside the model, or take a model that was trained with them"
        )
    if leads_outside(state := str(normalizer["state_file"])):
        raise DataError(f"{_MODEL}: {file} names {state!r}, which is outside of {folder}; expected a file below it")
    return [file, folder / state]
