"""Finds the environment that a prompt names."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from hpcrl.config import EnvironmentConfig
from hpcrl.config.own import imported
from hpcrl.envs.environment import Environment
from hpcrl.errors import ConfigError

EnvironmentClass = Callable[[Mapping[str, Any]], Environment]

ENVIRONMENTS: dict[str, str] = {
    "arithmetic": "hpcrl.envs.arithmetic:Arithmetic",
    "calculator": "hpcrl.envs.calculator:Calculator",
    "count_letters": "hpcrl.envs.words:CountLetters",
    "countdown": "hpcrl.envs.countdown:Countdown",
    "direct_math": "hpcrl.envs.rewarded:DirectMath",
    "format": "hpcrl.envs.rewarded:Format",
    "gsm8k": "hpcrl.envs.rewarded:GSM8K",
    "gsm8k_multi_turn": "hpcrl.envs.gsm8k_multi_turn:GSM8KMultiTurn",
    "guess_number": "hpcrl.envs.guess_number:GuessNumber",
    "llm_as_a_judge": "hpcrl.envs.llm_judge:LLMJudge",
    "math": "hpcrl.envs.rewarded:Math",
    "python_tool": "hpcrl.envs.python_tool:PythonTool",
    "reverse_word": "hpcrl.envs.words:ReverseWord",
    "search": "hpcrl.envs.search:Search",
    "single_choice": "hpcrl.envs.rewarded:SingleChoice",
    "sort_letters": "hpcrl.envs.sort_letters:SortLetters",
    "text2sql": "hpcrl.envs.text2sql:Text2SQL",
}
"""Where each environment is, imported when it is first wanted; docs/environments has a page on each."""


def make_environment(name: str, extras: Mapping[str, Any]) -> Environment:
    """Return a new environment for one sample.

    Args:
        name: a name in `ENVIRONMENTS`, or "package.module:Class" for a user's own.
        extras: what the environment gets to know: `common_extras`, and the columns of the prompt's row that are not hpcrl's own.

    Raises:
        ConfigError: nothing has this name.
        DataError: the extras lack what the environment needs.
    """
    return environment_class(name)(extras)


def environment_class(name: str) -> EnvironmentClass:
    """Return what makes the environments of a name.

    Raises:
        ConfigError: nothing has this name.
    """
    module_name, colon, class_name = name.partition(":")
    if name not in ENVIRONMENTS and not colon:
        near = difflib.get_close_matches(name, ENVIRONMENTS, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(sorted(ENVIRONMENTS))}."
        raise ConfigError(f"unknown environment {name!r}. {hint} Your own is written as package.module:Class.")
    found = imported(f"environment {name!r}", ENVIRONMENTS.get(name, name))
    if not isinstance(found, type):
        raise ConfigError(f"environment {name!r}: module {module_name!r} has no class {class_name!r}")
    return found


def common_extras(environment: EnvironmentConfig, max_turns: int) -> dict[str, Any]:
    """Return the extras that all environments of a run have; those of a row go first."""
    return {"custom": environment.custom, "max_turns": max_turns, "skyrl_gym": environment.skyrl_gym}
