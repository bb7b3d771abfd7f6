"""`hpcrl env …`: list the environments, play one, or a reward, in the terminal, and check tasks of sandboxes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

from hpcrl.cli._common import Subcommands, add_root
from hpcrl.cli.env_tasks import add_tasks
from hpcrl.text import one_line, printable, said_in

if TYPE_CHECKING:
    import io

    from hpcrl.config import Config, EnvironmentConfig, GeneratorConfig
    from hpcrl.envs.base import Environment, Messages, Turn
    from hpcrl.envs.tools.sandboxes import Sandboxes
    from hpcrl.types import Prompt

_TURNS = 10  # without a configuration
_SANDBOXES = 4  # at a time
_EMPTY_LINE = "\\"
_TABLES = "config_class", "python_path", "data", "environment", "generator"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command = Subcommands(parser).add
    add_tasks(command)
    command("ls", "list the environments of hpcrl, with a line about each", _ls)
    play = command(
        "try", "play an environment or a reward: read the prompt, type the response of the policy, see the reward", _try
    )
    play.epilog = (
        "With environment.group_reward_function in --config and no NAME, samples are read until the input ends, and then compared. "
        "An action is ended by an empty line or by the end of the input; a line with nothing but \\ stands for an empty line within it. "
        "The exit code is 1 if the input ends before the environment does."
    )
    play.add_argument(
        "name",
        metavar="NAME",
        nargs="?",
        help="an environment that ls shows or environment.names of --config has, a reward of docs/rewards.md, or package.module:Class or "
        "package.module:function. An import path is looked for in python_path of --config, else in the working directory. Default: what --config rewards training with",
    )
    play.add_argument(
        "--data", metavar="FILE", help="dataset (default: the first of data.train_data, else example rows)"
    )
    play.add_argument("--sample", type=int, default=0, metavar="N", help="which row; the first is 0 (default)")
    add_root(play)
    play.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help=f"its tables data, environment and generator, which may be alone in it (default: {_TURNS} turns)",
    )


def _ls(arguments: argparse.Namespace) -> int:  # noqa: ARG001 - as every command
    from hpcrl.envs.registry import ENVIRONMENTS, environment_class

    width = max(map(len, ENVIRONMENTS))
    for name in sorted(ENVIRONMENTS):
        print(f"{name:{width}}  {(environment_class(name).__doc__ or '').strip().partition(chr(10))[0]}")
    return 0


def _try(arguments: argparse.Namespace) -> int:
    from hpcrl.config import Config, EnvironmentConfig, GeneratorConfig
    from hpcrl.envs.base import user_code
    from hpcrl.envs.examples import rows_of
    from hpcrl.errors import ConfigError
    from hpcrl.rundir.layout import default_root
    from hpcrl.sandboxes.local import local_sandboxes

    if arguments.name is None and arguments.config is None:
        raise ConfigError("env try: expected NAME, or --config FILE with what rewards training")
    required = {"trainer.policy.model.path": "none", "data.train_data": [str(rows_of(arguments.name or "it"))]}
    config = Config.from_tables(arguments.config, _TABLES, required) if arguments.config else None
    if config is None:
        sys.path.append(os.getcwd())
    section, generator = (
        (config.environment, config.generator) if config else (EnvironmentConfig(), GeneratorConfig(max_turns=_TURNS))
    )
    where, make = _maker(arguments.name and section.path_of(arguments.name), section, generator)
    prompt, root, network = (
        _prompt(arguments, config),
        arguments.root or default_root(),
        section.skyrl_gym.sandbox.network,
    )

    def played() -> _Sample | None:
        with user_code(where):
            environment = make(prompt, sandboxes)
        try:
            return _play(environment, where, prompt.messages, generator.max_turns)
        finally:
            with user_code(where):
                environment.close()

    with local_sandboxes(root, _SANDBOXES, network=network) as sandboxes:
        if arguments.name is None and section.group_reward_function:
            return _compare(played, prompt, section, generator.sampling_params.max_generate_length)
        return 1 if played() is None else 0


def _maker(
    name: str | None, section: EnvironmentConfig, generator: GeneratorConfig
) -> tuple[str, Callable[[Prompt, Sandboxes], Environment]]:
    """Return what is played, for errors, and what makes it for a row; without a name it is what rewards training."""
    from hpcrl.config.import_path import imported
    from hpcrl.config.sections.functions import GROUP_REWARDS
    from hpcrl.envs.registry import ENVIRONMENTS, common_extras, environment_class, is_agent
    from hpcrl.envs.rewards.weighted import REWARDS
    from hpcrl.errors import ConfigError

    if name in section.group_reward_function or name in GROUP_REWARDS.keys() - REWARDS.keys():
        raise ConfigError(
            f"env try: {name} compares the samples of a group; leave NAME out, with environment.group_reward_function in --config"
        )
    weights = section.reward_function if name is None else {name: 1.0} if name in REWARDS.keys() - ENVIRONMENTS else {}
    if name is None and not weights and (section.uses_reward_service("train") or section.is_rewarded_later("train")):
        raise ConfigError(
            "env try: a service or a reward model rewards training, and none is asked here; name an environment or a reward"
        )
    if name and ":" in name:
        found = imported(f"environment or reward {name!r}", name)
        weights = {name: 1.0} if callable(found) and not isinstance(found, type) else {}
    if weights:
        length = generator.sampling_params.max_generate_length
        return "the rewards", lambda prompt, _: cast("Environment", _Rewarded(weights, section, prompt, length))
    if name is not None:
        environment_class(name)

    def make(prompt: Prompt, sandboxes: Sandboxes) -> Environment:
        made = environment_class(name or prompt.env_class)
        if is_agent(made):
            raise ConfigError(
                f"{name or prompt.env_class} asks the policy itself, and nobody answers it here; start its program by hand at any server of "
                "OpenAI's protocol (docs/agents.md)"
            )
        return cast("Environment", made({**common_extras(section, generator.max_turns, sandboxes), **prompt.extras}))

    return f"environment {name or section.env_class!r}", make


class _Rewarded:
    """Rewards of one row, played as an environment of one turn."""

    def __init__(self, weights: dict[str, float], section: EnvironmentConfig, prompt: Prompt, max_tokens: int) -> None:
        from hpcrl.envs.rewards.response import truth_of
        from hpcrl.envs.rewards.weighted import WeightedRewards

        self._rewards = WeightedRewards("environment.reward_function", weights, section)
        self._prompt, self._max_tokens = prompt, max_tokens
        print(printable(f"[ground truth]\n{truth_of(prompt.extras)}\n"))

    def init(self, messages: Messages) -> Messages:
        return messages

    def step(self, action: str) -> Turn:
        from hpcrl.envs.rewards.response import response_to

        return self._rewards(response_to(self._prompt, action, len(action) // 4 + 1, self._max_tokens))

    def close(self) -> None:
        return


def _prompt(arguments: argparse.Namespace, config: Config | None) -> Prompt:
    from hpcrl.config import DataConfig
    from hpcrl.data.prompts import load_prompts
    from hpcrl.data.sources import Source, training_sources
    from hpcrl.envs.examples import rows_of
    from hpcrl.errors import DataError

    own = rows_of(arguments.name or "it")
    named = Source(arguments.data or str(own))
    if config and not arguments.data:
        named = training_sources(config.data)[0]
    source = named.location
    _expect_rows(source)
    if source == str(own) and not own.is_file():
        raise DataError(f"{arguments.name or 'what rewards training'} has no example rows; name a dataset: --data FILE")
    number, data = arguments.sample, config.data if config else DataConfig(train_data=[source])
    columns = data.prompt_column, data.response_column, data.image_column, data.video_column
    played = arguments.name or (config.environment.env_class if config else None)
    required = bool(arguments.name) or not (config and config.environment.reward_function)
    rules = {"env_class_required": required, "path_of": config.environment.path_of if config else str}
    prompts = load_prompts([named], played, *columns, first=max(number, 0) + 1, **rules)
    if not 0 <= number < len(prompts):
        rows = f"rows 0 to {len(prompts) - 1}" if number >= 0 else "rows from 0 on"
        raise DataError(f"--sample {number}: {source} has {rows}")
    return prompts[number]


def _expect_rows(source: str) -> None:
    """Raise DataError where a source is a folder of tasks, of which rows are to be made first."""
    from hpcrl.envs.terminal.folders import task_folders
    from hpcrl.errors import DataError

    try:
        task_folders(Path(source))
    except DataError:
        return
    raise DataError(f"{source} is a folder of tasks: `hpcrl env rows {source} > tasks.jsonl` makes a dataset of them")


@dataclass
class _Sample:
    """A sample that was played.

    Attributes:
        messages: those after the prompt.
        roles: in which the policy has acted.
    """

    messages: Messages = field(default_factory=list)
    roles: set[str] = field(default_factory=set)
    reward: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)


def _play(environment: Environment, where: str, messages: Messages, max_turns: int) -> _Sample | None:
    """Play until the environment is done, or its turns are over; None: the input ended before."""
    from hpcrl.envs.base import user_code

    with user_code(where):
        opening = environment.init(messages)
    _show(opening)
    sample = _Sample()
    for number in range(1, max_turns + 1):
        action = _read_action()
        if action is None:
            print(f"hpcrl: the input ended before the environment was done, after {number - 1} turns", file=sys.stderr)
            return None
        with user_code(where):
            turn = environment.step(action)
        sample.roles.add(turn.role)
        sample.reward += turn.reward + sum(value for role, value in turn.rewards.items() if role in sample.roles)
        sample.metrics |= turn.metrics
        sample.messages.append({"role": "assistant", "content": action if turn.action is None else turn.action})
        _show_turn(turn)
        if turn.done or number == max_turns:
            over = "done" if turn.done else f"ended by generator.max_turns = {max_turns}"
            print(f"{over} after {number} turn{'s' * (number > 1)}, total reward {sample.reward:g}")
            return sample
        sample.messages += turn.observations
        _show(turn.observations)
    raise AssertionError("a configuration has at least one turn")


def _compare(played: Callable[[], _Sample | None], prompt: Prompt, section: EnvironmentConfig, max_tokens: int) -> int:
    """Play samples until the input ends, show what each is worth in their group, and return the exit code."""
    from hpcrl.envs.rewards.grouped import WeightedGroupRewards
    from hpcrl.envs.rewards.response import GroupSample, response_to
    from hpcrl.errors import ServiceError

    rewards, group = WeightedGroupRewards(section.group_reward_function, section), list[GroupSample]()
    while _has_input() and (sample := played()) is not None:
        text = sample.messages[-1]["content"]
        response = response_to(prompt, text, len(text) // 4 + 1, max_tokens)
        own = {"reward": sample.reward, "metrics": sample.metrics, "conversation": sample.messages}
        group.append(GroupSample(**vars(response), **own))
    if not group:
        return 1
    for number, (sample, values) in enumerate(zip(group, rewards(group), strict=True), 1):
        if isinstance(values, ServiceError):
            print()
            print(one_line(f"sample {number} of {len(group)} has failed: {values}"))
            continue
        print(
            f"\nsample {number} of {len(group)}: reward {rewards.own_weight * sample.reward + rewards.added(values):g}"
        )
        for name, value in values.items():
            print(one_line(f"  {name} {value:g}"))
    return 0


def _has_input() -> bool:
    return sys.stdin.isatty() or bool(cast("io.BufferedReader", sys.stdin.buffer).peek(1))


def _show(messages: Messages) -> None:
    for message in messages:
        print(printable(f"[{message['role']}]\n{said_in(message['content'])}\n"))


def _show_turn(turn: Turn) -> None:
    if turn.action is not None:
        print(printable(f"[replaced by]\n{turn.action}\n"))
    if turn.role or not turn.trained:
        print(one_line(f"role {turn.role or '(none)'}{'' if turn.trained else ', not trained'}"))
    print(f"reward {float(turn.reward):g}")
    for role, value in turn.rewards.items():
        print(one_line(f"  reward of {role} {float(value):g}"))
    for name, value in turn.metrics.items():
        print(one_line(f"  {name} {float(value):g}"))
    print()


def _read_action() -> str | None:
    """Return the typed lines up to an empty line or the end of the input; None at the end."""
    if sys.stdin.isatty():
        print("> ", end="", flush=True)
    lines: list[str] = []
    while line := _read_line():
        text = line.removesuffix("\n").removesuffix("\r")
        if not text:
            return "\n".join(lines)
        lines.append("" if text == _EMPTY_LINE else text)
    return "\n".join(lines) if lines else None


def _read_line() -> str:
    from hpcrl.errors import DataError

    try:
        return sys.stdin.buffer.readline().decode()
    except UnicodeDecodeError as error:
        raise DataError(f"an action is UTF-8 text; the input has {error.object[error.start]:#04x} in it") from error
