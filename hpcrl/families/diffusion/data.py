"""Prompts, tokens and rows of pipelines: its functions are those of hpcrl.data.family.DataFamily."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hpcrl.config import Config
from hpcrl.families.diffusion.pipelines.pictures import PictureRows
from hpcrl.families.diffusion.pipelines.tokens import prompt_counter, row_decoder
from hpcrl.types import Prompt

if TYPE_CHECKING:
    from hpcrl.data.rollouts import Decode


def counted_prompts(config: Config) -> tuple[Callable[[Prompt], int], int]:
    trainer = config.trainer
    return prompt_counter(trainer.policy.model.pretrained), trainer.policy.diffusers.max_prompt_length


def decoder(config: Config) -> Decode:
    return row_decoder(config.trainer.policy.model.pretrained)


def row_format(config: Config) -> PictureRows:
    return PictureRows.of(config.trainer.policy.diffusers)


def noted_format(noted: Mapping[str, Any]) -> PictureRows | None:
    return PictureRows(**noted) if "frames" in noted else None
