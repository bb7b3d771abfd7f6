"""Prompts and tokens of language models: its functions are those of hpcrl.data.family.DataFamily."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hpcrl.config import Config
from hpcrl.data.chat.count import token_counter
from hpcrl.data.tokenizer import decoder as text_decoder
from hpcrl.data.tokenizer import load_tokenizer
from hpcrl.data.vision.reader import Preparation
from hpcrl.types import Prompt

if TYPE_CHECKING:
    from hpcrl.data.rollouts import Decode


def counted_prompts(config: Config) -> tuple[Callable[[Prompt], int], int]:
    trainer, generator = config.trainer, config.generator
    template, options = generator.chat_template, generator.chat_template_kwargs
    count = token_counter(trainer.policy.model.pretrained, template, options, Preparation.of(config.data))
    return count, trainer.max_prompt_length


def decoder(config: Config) -> Decode:
    return text_decoder(load_tokenizer(config.trainer.policy.model.pretrained, config.generator.chat_template))


def row_format(config: Config) -> None:  # noqa: ARG001
    return None


def noted_format(noted: Mapping[str, Any]) -> None:  # noqa: ARG001
    return None
