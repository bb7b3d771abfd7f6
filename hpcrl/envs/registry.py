"""Registry of environments: each name with its class, a user's own by import path, and the settings common to all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from hpcrl.config import EnvironmentConfig
from hpcrl.config.import_path import imported
from hpcrl.envs.base import AgentEnvironment, Environment
from hpcrl.envs.skyrl_gym import SkyRLGymEnvironment, is_of_skyrl_gym
from hpcrl.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from hpcrl.envs.tools.sandboxes import Sandboxes

EnvironmentClass = Callable[[Mapping[str, Any]], Environment | AgentEnvironment]

ENVIRONMENTS: dict[str, str] = {
    "agent": "hpcrl.envs.tasks.agent:Agent",
    "arithmetic": "hpcrl.envs.tasks.arithmetic:Arithmetic",
    "calculator": "hpcrl.envs.tasks.calculator:Calculator",
    "count_letters": "hpcrl.envs.tasks.words:CountLetters",
    "countdown": "hpcrl.envs.tasks.countdown:Countdown",
    "direct_math": "hpcrl.envs.tasks.rewarded:DirectMath",
    "format": "hpcrl.envs.tasks.rewarded:Format",
    "geometry3k": "hpcrl.envs.tasks.geometry3k:Geometry3K",
    "gsm8k": "hpcrl.envs.tasks.rewarded:GSM8K",
    "gsm8k_multi_turn": "hpcrl.envs.tasks.gsm8k_multi_turn:GSM8KMultiTurn",
    "guess_number": "hpcrl.envs.tasks.guess_number:GuessNumber",
    "llm_as_a_judge": "hpcrl.envs.tasks.llm_judge:LLMJudge",
    "math": "hpcrl.envs.tasks.rewarded:Math",
    "python_tool": "hpcrl.envs.tasks.python_tool:PythonTool",
    "reverse_word": "hpcrl.envs.tasks.words:ReverseWord",
    "robot": "hpcrl.envs.tasks.robot:Robot",
    "sandbox": "hpcrl.envs.tasks.sandbox:SandboxEnvironment",
    "search": "hpcrl.envs.tasks.search:Search",
    "single_choice": "hpcrl.envs.tasks.rewarded:SingleChoice",
    "sort_letters": "hpcrl.envs.tasks.sort_letters:SortLetters",
    "text2sql": "hpcrl.envs.tasks.text2sql:Text2SQL",
}
"""Where each environment is, imported when it is first wanted; docs/environments has a page on each."""


def make_environment(name: str, extras: Mapping[str, Any]) -> Environment | AgentEnvironment:
    """Return a new environment for one sample.

    Args:
        name: a name in `ENVIRONMENTS`, or "package.module:Class" for a user's own.
        extras: what the environment can read: `common_extras`, and the columns of the prompt's row that are not hpcrl's own.

    Raises:
        ConfigError: nothing has this name.
        DataError: the extras lack what the environment needs.
    """
    return environment_class(name)(extras)


def environment_class(name: str) -> EnvironmentClass:
    """Return what makes the environments of a name.

    Raises:
        ConfigError: nothing has this name, or what has it is no environment.
    """
    module_name, colon, class_name = name.partition(":")
    if name not in ENVIRONMENTS and not colon:
        hint = did_you_mean(name, ENVIRONMENTS) or f"; known: {', '.join(sorted(ENVIRONMENTS))}."
        raise ConfigError(
            f"unknown environment {name!r}{hint} Your own is written as package.module:Class, or gets a name in environment.names."
        )
    found = imported(f"environment {name!r}", ENVIRONMENTS.get(name, name))
    if not isinstance(found, type):
        raise ConfigError(f"environment {name!r}: module {module_name!r} has no class {class_name!r}")
    turn = "play" if is_agent(found) else "step"
    lacking = [method for method in ("init", turn, "close") if not callable(getattr(found, method, None))]
    if lacking:
        raise ConfigError(
            f"environment {name!r} has no method {lacking[0]!r}; expected a class with the methods of hpcrl.envs.base.Environment or "
            "AgentEnvironment, which may derive from it"
        )
    return partial(SkyRLGymEnvironment, found) if is_of_skyrl_gym(found) else found


def is_agent(environment: object) -> bool:
    """Return whether an environment, or its class, asks the policy itself: an AgentEnvironment, by what it has."""
    return callable(getattr(environment, "play", None)) and not callable(getattr(environment, "step", None))


def common_extras(environment: EnvironmentConfig, max_turns: int, sandboxes: Sandboxes | None = None) -> dict[str, Any]:
    """Return what all environments of a run can read beside the columns of their row, which go first.

    Args:
        environment: the section `environment`, a user's own fields included where its class is one of `make_config`.
        max_turns: generator.max_turns.
        sandboxes: of the run (slurm.sandboxes); None: it has none.
    """
    return {
        "environment": environment,
        "custom": environment.custom,
        "skyrl_gym": environment.skyrl_gym,
        "max_turns": max_turns,
        "sandboxes": sandboxes,
    }
