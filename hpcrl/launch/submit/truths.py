"""Scores ground truths of a sample of rows before submission: each, put into an answer, must be worth 1.

A ground truth that a reward reads otherwise than an answer makes right answers wrong, and a run trains on that without an error.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from hpcrl.config import Config, EnvironmentConfig
from hpcrl.config.errors import Problem
from hpcrl.data.datasets import are_played, row_reader
from hpcrl.data.sources import Source
from hpcrl.envs.base import Environment, finite, user_code
from hpcrl.envs.registry import common_extras, environment_class, is_agent
from hpcrl.envs.rewards.response import Response, truth_of
from hpcrl.envs.rewards.weighted import BY_DATA_SOURCE, GROUND_TRUTHS, REWARDS, reward_of, solution
from hpcrl.errors import DataError, HpcrlError
from hpcrl.launch.submit.own_code import missing_package, not_tried
from hpcrl.types import Kind, Prompt

_ROWS, _MOST_SHOWN = 200, 5
_READ_S, _TRY_S = 5.0, 15.0
_found: dict[str, tuple[list[Problem], list[str]]] = {}

Worth = Callable[[], float | None]
"""Returns the reward of a ground truth as an answer; None where what rewards it knows no answer."""


@dataclass
class _Tried:
    """Ground truths that one reward or environment was tried on.

    Attributes:
        failed: a line for each that is not worth 1.
        package: that this machine lacks.
    """

    count: int = 0
    failed: list[str] = field(default_factory=list)
    package: str | None = None

    def add(self, row: int, truth: Any, worth: Worth) -> None:
        """Try a ground truth."""
        try:
            value = worth()
        except HpcrlError as error:
            self.package = missing_package(error)
            problem = str(error)
        else:
            if value is None:
                return
            problem = "" if math.isclose(value, 1.0) else f"{truth!r:.80} is worth {value:g}"
        self.count += 1
        if problem:
            self.failed.append(f"row {row}: {problem}")


def check_truths(
    setting: str, source: Source, kinds: Sequence[Kind], config: Config, changed: int
) -> tuple[list[Problem], list[str]]:
    """Try ground truths of a file: those of `_ROWS` rows, evenly spaced among as many as are read in `_READ_S` seconds.

    Args:
        setting: that names the file.
        kinds: what the rows serve.
        changed: when the file was. Elements of a sweep mostly have the same files, each of which is tried once.

    Returns:
        A problem for a row that cannot be used, and where no ground truth is worth 1; warnings about single ones.
    """
    asked = (setting, source, changed, kinds, config.data, config.environment, config.generator.max_turns)
    if (key := repr(asked)) not in _found:
        _found[key] = _check(setting, source, kinds, config)
    return _found[key]


def _check(setting: str, source: Source, kinds: Sequence[Kind], config: Config) -> tuple[list[Problem], list[str]]:
    environment, tried = config.environment, dict[str, _Tried]()
    trials = _trials(environment, kinds, config.generator.max_turns)
    if not trials:
        return [], []
    path = source.location
    read = row_reader(source, kinds, config.data, environment, config.generator.max_turns)
    try:
        rows = spread(source.rows(), _ROWS, _READ_S)
        until = time.monotonic() + _TRY_S
        for number, row in rows:
            if time.monotonic() > until:
                break
            prompt = read(row, number)
            for name, worth in trials(prompt):
                found = tried.setdefault(name, _Tried())
                if found.package is None:
                    found.add(number, truth_of(prompt.extras), worth)
    except DataError as error:
        return [Problem(setting, str(error))], []
    problems, warnings = list[Problem](), list[str]()
    for name, found in tried.items():
        if found.package:
            warnings.append(f"{setting}: {name} on the ground truths of {path} {not_tried(found.package)}")
        elif found.failed:
            shown = "; ".join(found.failed[:_MOST_SHOWN]) + ("; …" if len(found.failed) > _MOST_SHOWN else "")
            message = (
                f"{len(found.failed)} of {found.count} ground truths of {path} that were tried are not worth 1 with {name} as the answer "
                f"to their own row; correct or drop such rows: {shown}"
            )
            if len(found.failed) == found.count:
                problems.append(Problem(setting, message))
            else:
                warnings.append(f"{setting}: {message}")
    return problems, warnings


def spread(rows: Iterable[Any], most: int, seconds: float) -> list[tuple[int, Any]]:
    """Return up to `most` rows with their numbers, evenly spaced among those that can be read in some seconds."""
    chosen, every, until = list[tuple[int, Any]](), 1, time.monotonic() + seconds
    for number, row in enumerate(rows):
        if number % every == 0:
            if len(chosen) == most:
                chosen, every = chosen[::2], 2 * every
            if number % every == 0:
                chosen.append((number, row))
        if time.monotonic() > until:
            break
    return chosen


def _trials(
    environment: EnvironmentConfig, kinds: Sequence[Kind], max_turns: int
) -> Callable[[Prompt], Iterator[tuple[str, Worth]]] | None:
    comparing = (*GROUND_TRUTHS, BY_DATA_SOURCE)
    named = dict.fromkeys(name for kind in kinds for name in environment.reward_weights(kind) if name in comparing)
    played, extras = are_played(environment, kinds), common_extras(environment, max_turns)
    if not (named or played):
        return None

    def of_reward(name: str, prompt: Prompt) -> tuple[str, Worth]:
        name, truth = reward_of(name, prompt.data_source), truth_of(prompt.extras)
        return f"reward {name!r}", lambda: REWARDS[name](
            Response(text=solution(name, truth), ground_truth=truth), environment
        )

    def trials(prompt: Prompt) -> Iterator[tuple[str, Worth]]:
        for name in named:
            yield of_reward(name, prompt)
        if not played:
            return
        if is_agent(environment_class(prompt.env_class)):
            for name in environment.skyrl_gym.agent.reward_function:
                if name in GROUND_TRUTHS:
                    yield of_reward(name, prompt)
        else:
            yield f"environment {prompt.env_class!r}", lambda: _played(prompt, {**extras, **prompt.extras})

    return trials


def _played(prompt: Prompt, extras: dict[str, Any]) -> float | None:
    made = environment_class(prompt.env_class)
    if getattr(made, "solution", Environment.solution) is Environment.solution:
        return None
    with user_code(f"environment {prompt.env_class!r}"):
        environment = cast(Environment, made(extras))
        try:
            if (action := environment.solution()) is None:
                return None
            environment.init(list(prompt.messages))
            return finite(environment.step(action).reward)
        finally:
            environment.close()
