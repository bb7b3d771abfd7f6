"""Finds a user's own classes and functions, which settings name by import path, before submission.

A package that only this machine lacks, such as torch on a login node, is no reason to refuse a run: that is a warning. A module or a name
that does not exist, or a module that cannot be imported, would end every attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from inspect import signature

from hpcrl.algorithms.settings import configured
from hpcrl.config import Config
from hpcrl.config.errors import Problem
from hpcrl.config.import_path import find
from hpcrl.envs.base import user_code
from hpcrl.envs.registry import environment_class
from hpcrl.errors import ConfigError, HpcrlError
from hpcrl.observe.trackers.base import trackers_of


def check_own_code(config: Config) -> tuple[list[Problem], list[str]]:
    """Import what is a user's own: environment, rewards, estimator and loss, with the settings that they read.

    Returns:
        What would end the run, and what cannot be known on this machine.
    """
    problems, warnings = [], []
    for path, name, look in _named(config):
        try:
            with user_code(f"{name!r}"):
                look()
        except HpcrlError as error:
            if package := missing_package(error):
                warnings.append(f"{path}: {name} {not_tried(package)}")
            else:
                message = str(error).removeprefix(f"{name!r}: ")
                problems.append(Problem(path, message.removeprefix(f"{path}=")))
    return problems, warnings


def _named(config: Config) -> Iterator[tuple[str, str, Callable[[], object]]]:
    environment, algorithm = config.environment, config.trainer.algorithm
    if environment.env_class and ":" in environment.env_class:
        name = environment.env_class
        yield "environment.env_class", name, lambda: environment_class(name)
    for name in environment.names.values():
        yield "environment.names", name, lambda name=name: environment_class(name)
    for name in environment.allowed_env_classes:
        if ":" in name:
            yield "environment.allowed_env_classes", name, lambda name=name: environment_class(name)
    for path, names, judged in (
        ("environment.reward_function", environment.reward_function, "response"),
        ("environment.eval_reward_function", environment.eval_reward_function, "response"),
        ("environment.group_reward_function", environment.group_reward_function, "group"),
        ("environment.skyrl_gym.agent.reward_function", environment.skyrl_gym.agent.reward_function, "response"),
    ):
        for name in names:
            if ":" in name:
                yield path, name, lambda path=path, name=name, judged=judged: _reward(path, name, judged)
    for name in trackers_of(config.trainer.logger):
        if ":" in name:
            yield "trainer.logger", name, lambda name=name: find("trainer.logger", name, {})
    for setting in ("advantage_estimator", "policy_loss_type"):
        name = getattr(algorithm, setting)
        if ":" in name:
            path = f"trainer.algorithm.{setting}"
            yield path, name, lambda setting=setting, name=name: configured(setting, name, {}, algorithm)


def _reward(setting: str, name: str, judged: str) -> None:
    """Raise ConfigError where a reward cannot be called with what it judges, a response or a group, and the section `environment`."""
    function = find(setting, name, {})
    with suppress(ValueError):  # a signature that only C knows
        try:
            signature(function).bind(None, None)
        except TypeError as error:
            raise ConfigError(
                f"{setting}={name!r}: expected a function of two arguments, ({judged}, environment), found "
                f"{name.rpartition(':')[2]}{signature(function)}: {error}"
            ) from error


def missing_package(error: BaseException) -> str | None:
    """Return the package that this machine lacks, if own code failed because it imports that; None: another reason."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ModuleNotFoundError):
        cause = cause.__cause__
    package = ((cause.name if cause else None) or "").partition(".")[0]
    return package if package and find_spec(package) is None else None


def not_tried(package: str) -> str:
    """Return the end of a warning about something that cannot be tried on this machine."""
    return f"is not tried, because this machine has no package {package!r}; the job finds out"
