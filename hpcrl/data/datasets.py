"""The datasets that a configuration names: read, and each row checked against what will play or score it; and how long its prompts are."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from hpcrl.config import Config, DataConfig, EnvironmentConfig
from hpcrl.config.derive import policy_model, reward_weights
from hpcrl.config.families import is_diffusion, moves_by_flow
from hpcrl.config.reward_model import is_rewarded_later, uses_reward_service
from hpcrl.data.chat.count import token_counter
from hpcrl.data.pi05 import inputs
from hpcrl.data.pipelines.tokens import prompt_counter
from hpcrl.data.prompts import load_prompts
from hpcrl.data.tokenizer import without_torch
from hpcrl.data.vision.reader import Preparation
from hpcrl.envs.base import user_code
from hpcrl.envs.registry import common_extras, environment_class
from hpcrl.envs.rewards.response import truth_of
from hpcrl.envs.rewards.weighted import GROUND_TRUTHS
from hpcrl.errors import DataError
from hpcrl.types import Kind, Prompt


def load_dataset(
    sources: Sequence[str],
    kinds: Sequence[Kind],
    data: DataConfig,
    environment: EnvironmentConfig,
    max_turns: int,
    first: int | None = None,
    own: bool = False,
) -> list[Prompt]:
    """Return the rows of some files, in order.

    Args:
        sources: paths, of data.train_data or data.val_data.
        kinds: what the rows serve: training, evaluation or both.
        max_turns: generator.max_turns.
        first: rows of each file that are read at most; unset: all.
        own: as of `row_requirements`.

    Raises:
        DataError: a file is missing, unreadable or empty, or a row lacks what a prompt, its reward or its environment needs.
    """
    requirements = row_requirements(environment, kinds, max_turns, own)
    columns = data.prompt_column, data.response_column, data.image_column, data.video_column
    return load_prompts(sources, environment.env_class, *columns, first=first, **requirements)


def row_requirements(
    environment: EnvironmentConfig, kinds: Sequence[Kind], max_turns: int, own: bool = False
) -> dict[str, Any]:
    """Return what rows must have that serve training, evaluation or both, as arguments of `load_prompts`.

    Rows that an environment of hpcrl's own plays are tried on it. Of users' own, a row names only such as the configuration names too.

    Args:
        max_turns: generator.max_turns, which environments can read.
        own: try the rows of a user's own environments too. A run's controller does not: it would import what only replicas need.
    """
    weights = [reward_weights(environment, kind) for kind in kinds]
    reads = dict.fromkeys(GROUND_TRUTHS[name] for rewards in weights for name in rewards if name in GROUND_TRUTHS)
    scored = all(
        reward_weights(environment, kind)
        or uses_reward_service(environment, kind)
        or is_rewarded_later(environment, kind)
        for kind in kinds
    )
    allowed = {environment.env_class, *environment.allowed_env_classes}
    played, extras_of_all = not scored, common_extras(environment, max_turns)

    def check(env_class: str, extras: Mapping[str, Any]) -> None:
        for read in reads:
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

    return {"env_class_required": played, "check": check}


def counted_prompts(config: Config) -> tuple[Callable[[Prompt], int], int]:
    """Return what counts the tokens of a prompt, as the policy's family writes it, and how many it may have.

    Raises:
        DataError: there is no tokenizer.
    """
    trainer, generator = config.trainer, config.generator
    with without_torch():
        if is_diffusion(trainer):
            return prompt_counter(policy_model(trainer)), trainer.policy.diffusers.max_prompt_length
        if moves_by_flow(config.vla):
            return inputs.prompt_counter(policy_model(trainer)), trainer.max_prompt_length
        template, options = generator.chat_template, generator.chat_template_kwargs
        count = token_counter(policy_model(trainer), template, options, Preparation.of(config.data))
        return count, trainer.max_prompt_length
