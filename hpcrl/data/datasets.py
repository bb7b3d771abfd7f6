"""The datasets that a configuration names: read, and each row checked against what will play or score it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpcrl.config import DataConfig, EnvironmentConfig
from hpcrl.config.derive import reward_weights, uses_reward_service
from hpcrl.data.prompts import load_prompts
from hpcrl.envs.registry import common_extras, make_environment
from hpcrl.envs.rewards.response import truth_of
from hpcrl.envs.rewards.weighted import GROUND_TRUTHS
from hpcrl.types import Kind, Prompt


def load_dataset(
    sources: Sequence[str],
    kinds: Sequence[Kind],
    data: DataConfig,
    environment: EnvironmentConfig,
    max_turns: int,
    first: int | None = None,
) -> list[Prompt]:
    """Return the rows of some files, in order.

    Args:
        sources: paths, of data.train_data or data.val_data.
        kinds: what the rows serve: training, evaluation or both.
        max_turns: generator.max_turns.
        first: rows of each file that are read at most; unset: all.

    Raises:
        DataError: a file is missing, unreadable or empty, or a row lacks what a prompt, its reward or its environment needs.
    """
    requirements = row_requirements(environment, kinds, max_turns)
    columns = environment.env_class, data.prompt_column, data.response_column
    return load_prompts(sources, *columns, first=first, **requirements)


def row_requirements(environment: EnvironmentConfig, kinds: Sequence[Kind], max_turns: int) -> dict[str, Any]:
    """Return what rows must have that serve training, evaluation or both, as arguments of `load_prompts`.

    Rows that an environment of hpcrl's own plays are tried on it. A user's own is not, for where the rows are first read it may
    not be installed.

    Args:
        max_turns: generator.max_turns, which environments can read.
    """
    weights = [reward_weights(environment, kind) for kind in kinds]
    reads = dict.fromkeys(GROUND_TRUTHS[name] for rewards in weights for name in rewards if name in GROUND_TRUTHS)
    scored = all(reward_weights(environment, kind) or uses_reward_service(environment, kind) for kind in kinds)
    played, extras_of_all = not scored, common_extras(environment, max_turns)

    def check(env_class: str, extras: Mapping[str, Any]) -> None:
        for read in reads:
            read(truth_of(extras))
        if played and ":" not in env_class:
            make_environment(env_class, {**extras_of_all, **extras})

    return {"env_class_required": played, "check": check}
