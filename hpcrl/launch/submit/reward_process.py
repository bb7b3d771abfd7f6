"""Calls a configuration's own reward functions on a few rows: python -m hpcrl.launch.submit.reward_process CONFIG

A process of its own, so that hpcrl/launch/submit/own_rewards.py can end a call that takes too long. Each call is a line of JSON on the standard
output before it begins, and another one with its result; what a function prints goes to the standard error.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hpcrl.config import Config
from hpcrl.config.import_path import find
from hpcrl.data.datasets import are_played, load_dataset, prompt_datasets
from hpcrl.envs.base import finite, user_code
from hpcrl.envs.registry import environment_class, is_agent
from hpcrl.envs.rewards.grouped import values_of
from hpcrl.envs.rewards.response import GroupSample, Response, Reward, response_to, truth_of
from hpcrl.envs.rewards.weighted import BY_DATA_SOURCE, GROUND_TRUTHS, solution
from hpcrl.errors import HpcrlError, UserCodeError
from hpcrl.types import Kind, Prompt

_ROWS = 4  # of each dataset
_GROUPS = "environment.group_reward_function"


@dataclass(frozen=True)
class RewardCall:
    """A call of one reward function.

    Attributes:
        setting: that names the function.
        data, file, row: setting and file of the dataset, and the number of the row.
        answer: text of the response; None: the row has no ground truth to be one.
        is_truth: whether that is the ground truth as it stands in the row.
        compares: whether a reward of hpcrl's compares with it too.
        value: of the reward; None: it has not ended, or raised.
        error: what it raised, with the last line of the user's file in the traceback.
        away: whether that only says what this machine lacks: a package, a file, a service.
        group: samples of the group, which answer with the ground truth and with nothing in turns; 0: it rewards one response.
    """

    setting: str
    reward: str
    data: str
    file: str
    row: int
    answer: str | None
    is_truth: bool
    compares: bool
    value: float | None = None
    error: str = ""
    away: bool = False
    group: int = 0


def own_rewards(config: Config, kind: Kind, prompt: Prompt | None = None) -> Iterator[tuple[str, str, bool]]:
    """Yield setting and import path of the user's reward functions for rows of a kind.

    The third value is whether a reward of hpcrl's compares with the ground truth beside them.

    Args:
        prompt: a row; None: yield those of any row.
    """
    environment = config.environment
    setting = "eval_reward_function" if kind == "eval" and environment.eval_reward_function else "reward_function"
    named = [(f"environment.{setting}", environment.reward_weights(kind))]
    if are_played(environment, [kind]) and (prompt is None or is_agent(environment_class(prompt.env_class))):
        agent = "environment.skyrl_gym.agent.reward_function"
        named.append((agent, environment.skyrl_gym.agent.reward_function))
    for path, weights in named:
        compares = not {*GROUND_TRUTHS, BY_DATA_SOURCE}.isdisjoint(weights)
        yield from ((path, name, compares) for name in weights if ":" in name)


def own_group_rewards(config: Config, kind: Kind) -> list[str]:
    """Return the import paths of the user's group rewards for rows of a kind."""
    return [name for name in config.environment.group_reward_function if ":" in name and kind == "train"]


def calls(config: Config) -> Iterator[RewardCall]:
    """Call each function on the first rows of its datasets, with an empty answer and with the ground truth; yield each call twice."""
    generator = config.generator
    lengths: dict[Kind, int] = {
        "train": generator.sampling_params.max_generate_length,
        "eval": generator.eval_sampling.max_generate_length,
    }
    for data, file, row, prompt, kind in _rows(config):
        for setting, name, compares in own_rewards(config, kind, prompt):
            reward: Reward = find(setting, name, {})
            for answer, is_truth in _answers(truth_of(prompt.extras)):
                call = RewardCall(setting, name, data, file, row, answer, is_truth, compares)
                yield call
                if answer is not None:
                    yield _called(call, reward, _response(prompt, answer, lengths[kind]), config.environment)
        for name in own_group_rewards(config, kind):
            truth, n = truth_of(prompt.extras), config.samples_per_prompt
            texts = [str(truth) if truth is not None and at % 2 == 0 else "" for at in range(n)]
            group = [
                GroupSample(**vars(_response(prompt, text, lengths[kind])), reward=float(bool(text))) for text in texts
            ]
            call = RewardCall(_GROUPS, name, data, file, row, "", False, False, group=n)
            yield call
            yield _called(
                call, lambda *given, n=name: values_of(find(_GROUPS, n, {}), *given)[0], group, config.environment
            )


def _rows(config: Config) -> Iterator[tuple[str, str, int, Prompt, Kind]]:
    """Yield the first rows of each dataset, once for each kind that they serve: setting, file, number, row and kind."""
    sections = config.data, config.environment, config.generator.max_turns
    for data, sources, kinds in prompt_datasets(config):
        for source in sources:
            for row, prompt in enumerate(load_dataset([source], kinds, *sections, first=_ROWS)):
                for kind in kinds:
                    yield data, source.location, row, prompt, kind


def _answers(truth: Any) -> Iterator[tuple[str | None, bool]]:
    """Yield an empty answer, the ground truth, and the forms in which hpcrl's own rewards read it."""
    yield "", False
    if truth is None:
        yield None, True
    if isinstance(truth, str | int | float):
        yield str(truth), True
        for name in GROUND_TRUTHS:
            with suppress(HpcrlError):
                if (text := solution(name, truth)) != str(truth):
                    yield text, False


def _response(prompt: Prompt, text: str, max_tokens: int) -> Response:
    return response_to(prompt, text, len(text) // 4 + 1, max_tokens)  # about as many tokens


def _called(call: RewardCall, function: Callable[..., Any], *judged: Any) -> RewardCall:
    try:
        with user_code(f"reward {call.reward!r}"):
            return replace(call, value=finite(function(*judged)))
    except HpcrlError as error:
        cause = error.__cause__ or error
        where = "" if isinstance(cause, UserCodeError) else _last_line(call.reward, cause)
        return replace(call, error=f"{error}{where}", away=_is_away(cause))


def _last_line(name: str, error: BaseException) -> str:
    """Return the last line of the function's file in a traceback, or of any file where none is."""
    frames = traceback.extract_tb(error.__traceback__)
    own = getattr(sys.modules.get(name.partition(":")[0]), "__file__", None)
    last = ([frame for frame in frames if frame.filename == own] or frames)[-1]
    return f" ({Path(last.filename).name}:{last.lineno}: {last.line})"


def _is_away(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, OSError | ModuleNotFoundError):
        error = error.__cause__ or error.__context__
    return error is not None


def main(path: str) -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for call in calls(Config.from_toml([path])):
        print(json.dumps(asdict(call)), file=answers, flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except HpcrlError as error:
        sys.exit(f"{type(error).__name__}: {error}")
