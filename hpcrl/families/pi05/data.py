"""Prompts and tokens of PI0.5: its functions are those of hpcrl.data.family.DataFamily."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hpcrl.config import Config
from hpcrl.families.pi05.inputs import prompt_counter, row_decoder
from hpcrl.types import Prompt

if TYPE_CHECKING:
    from hpcrl.data.rollouts import Decode


def counted_prompts(config: Config) -> tuple[Callable[[Prompt], int], int]:
    return prompt_counter(config.trainer.policy.model.pretrained), config.trainer.max_prompt_length


def decoder(config: Config) -> Decode:
    return row_decoder(config.trainer.policy.model.pretrained)


def row_format(config: Config) -> None:  # noqa: ARG001
    return None


def noted_format(noted: Mapping[str, Any]) -> None:  # noqa: ARG001
    return None
