"""Reads the datasets of a configuration, checks each row against its environment or reward, and counts tokens of prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from hpcrl.config import Config, DataConfig, EnvironmentConfig
from hpcrl.data.chat.messages import SYSTEM
from hpcrl.data.family import data_family
from hpcrl.data.prompts import load_by_source, load_prompts, prompt_reader
from hpcrl.data.sources import Source, training_sources, validation_sources
from hpcrl.data.tokenizer import without_torch
from hpcrl.envs.base import user_code
from hpcrl.envs.registry import common_extras, environment_class
from hpcrl.envs.rewards.response import truth_of
from hpcrl.envs.rewards.weighted import GROUND_TRUTHS, reward_of
from hpcrl.errors import DataError
from hpcrl.types import Kind, Prompt


class WatchedRow(Mapping[str, Any]):
    """A row that notes which of its columns are read.

    Args:
        read: gets their names, all where the row is copied or gone through.
    """

    def __init__(self, row: Mapping[str, Any], read: set[str]) -> None:
        self._row, self._read = row, read

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        return self._row[name]

    def __iter__(self) -> Iterator[str]:
        self._read.update(self._row)
        return iter(self._row)

    def __len__(self) -> int:
        return len(self._row)


def prompt_datasets(config: Config) -> list[tuple[str, list[Source], tuple[Kind, ...]]]:
    """Return the datasets of prompts that a run reads: the setting, its datasets, and what their rows serve."""
    data, offline, evaluates = config.data, config.trainer.offline, config.trainer.eval_interval > 0
    training: tuple[Kind, ...] = ("train",) if data.test_size is None else ("train", "eval")
    return [
        (
            "data.train_data" if data.train_function is None else "data.train_function",
            [] if offline else training_sources(data),
            training,
        ),
        ("data.val_data", validation_sources(data, [] if offline or not evaluates else data.val_data), ("eval",)),
        ("data.val_prompts", validation_sources(data, data.val_prompts if config.has_engines else []), ("eval",)),
    ]


def unread_columns(
    prompts: Sequence[Prompt], kinds: Sequence[Kind], data: DataConfig, environment: EnvironmentConfig, max_turns: int
) -> list[str]:
    """Return the columns of prompts that neither hpcrl nor what plays or scores them reads; code of a user's may read all.

    Args:
        kinds, max_turns: as of `load_dataset`.

    Raises:
        DataError: an environment cannot use a row.
    """
    weights = [environment.reward_weights(kind) for kind in kinds]
    if any(":" in name for rewards in weights for name in rewards):
        return []
    read = {"reward_spec", "tools", SYSTEM, data.image_column, data.video_column, data.response_column}
    extras_of_all, found = common_extras(environment, max_turns), dict[str, None]()
    for prompt in prompts:
        found |= dict.fromkeys(prompt.extras)
        if ":" in prompt.env_class:
            read |= prompt.extras.keys()
        elif prompt.env_class and are_played(environment, kinds):
            environment_class(prompt.env_class)(WatchedRow({**extras_of_all, **prompt.extras}, read))
    return [name for name in found if name not in read]


def load_dataset(
    sources: Sequence[Source],
    kinds: Sequence[Kind],
    data: DataConfig,
    environment: EnvironmentConfig,
    max_turns: int,
    first: int | None = None,
    own: bool = False,
) -> list[Prompt]:
    """Return the rows of datasets, in order.

    Args:
        sources: those of data.train_data, data.val_data or data.val_prompts.
        kinds: what the rows serve: training, evaluation or both.
        max_turns: generator.max_turns.
        first: rows of each dataset that are read at most; unset: all.
        own: as of `row_requirements`.

    Raises:
        DataError: a file is missing, unreadable or empty, or a row lacks what a prompt, its reward or its environment needs.
    """
    requirements = row_requirements(environment, kinds, max_turns, own)
    return load_prompts(sources, environment.env_class, *_columns(data), first=first, **requirements)


def load_by_dataset(
    sources: Sequence[Source], kinds: Sequence[Kind], data: DataConfig, environment: EnvironmentConfig, max_turns: int
) -> list[list[Prompt]]:
    """Return the rows of each dataset; arguments and errors as of `load_dataset`."""
    requirements = row_requirements(environment, kinds, max_turns)
    return load_by_source(sources, environment.env_class, *_columns(data), **requirements)


def row_reader(
    source: Source, kinds: Sequence[Kind], data: DataConfig, environment: EnvironmentConfig, max_turns: int
) -> Callable[[Any, int], Prompt]:
    """Return a function that builds a prompt from a dataset's row and its number; arguments and errors as of `load_dataset`."""
    requirements = row_requirements(environment, kinds, max_turns)
    read = prompt_reader([source], environment.env_class, *_columns(data), **requirements)
    return lambda row, number: read(row, str(number), source, number)


def _columns(data: DataConfig) -> tuple[str, str | None, str, str]:
    return data.prompt_column, data.response_column, data.image_column, data.video_column


def row_requirements(
    environment: EnvironmentConfig, kinds: Sequence[Kind], max_turns: int, own: bool = False
) -> dict[str, Any]:
    """Return the requirements on rows for training, evaluation or both, as arguments of `load_prompts`.

    Rows that an environment of hpcrl's own plays are tried on it. Of users' own, a row names only such as the configuration names too.

    Args:
        max_turns: generator.max_turns, which environments can read.
        own: try the rows of a user's own environments too. A run's controller does not: it would import what only replicas need.
    """
    weights = [environment.reward_weights(kind) for kind in kinds]
    names = dict.fromkeys(name for rewards in weights for name in rewards)
    allowed = {environment.env_class, *environment.allowed_env_classes, *environment.names.values()}
    played, extras_of_all = are_played(environment, kinds), common_extras(environment, max_turns)

    def check(env_class: str, extras: Mapping[str, Any], data_source: str) -> None:
        for name in names:
            if read := GROUND_TRUTHS.get(reward_of(name, data_source)):
                read(truth_of(extras))
        if played and ":" in env_class and env_class not in allowed:
            raise DataError(
                f"environment {env_class!r} is not one that the configuration allows, and a dataset does not choose what code runs. "
                f"If you trust it: environment.allowed_env_classes = [{json.dumps(env_class)}]"
            )
        if played and (own or ":" not in env_class):
            made = environment_class(env_class)
            with user_code(f"environment {env_class!r}") if ":" in env_class else nullcontext():
                made({**extras_of_all, **extras})

    return {"env_class_required": played, "check": check, "path_of": environment.path_of}


def are_played(environment: EnvironmentConfig, kinds: Sequence[Kind]) -> bool:
    """Return whether environments reward rows of one of these kinds, and not named rewards, a service or a reward model."""
    return not all(
        environment.reward_weights(kind) or environment.uses_reward_service(kind) or environment.is_rewarded_later(kind)
        for kind in kinds
    )


def counted_prompts(config: Config) -> tuple[Callable[[Prompt], int], int]:
    """Return a counter of a prompt's tokens, as the policy's family writes it, and the most that it may have; errors as of DataFamily."""
    with without_torch():
        return data_family(config).counted_prompts(config)
