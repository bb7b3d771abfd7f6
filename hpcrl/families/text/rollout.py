"""Generator of language models: its functions are those of hpcrl.rollout.family.RolloutFamily."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from hpcrl.config import Config
from hpcrl.config.family import families
from hpcrl.errors import DataError
from hpcrl.rollout.family import LoadedGenerator
from hpcrl.rollout.images.saved import SampleImages
from hpcrl.rundir.layout import Run

if TYPE_CHECKING:
    from hpcrl.rollout.generate import GroupGenerator


def load_generator(run: Run, config: Config, interval: int | None) -> LoadedGenerator:
    _check_entries(config)
    return load_conversations(run, config, interval)


def load_conversations(
    run: Run,
    config: Config,
    interval: int | None,
    states: Callable[..., Any] | None = None,
    generator: Callable[..., GroupGenerator] | None = None,
) -> LoadedGenerator:
    """Load tokenizer and image processor of a language model.

    Args:
        run, interval: as of `load_generator`.
        states: as of `ImageReader.of`.
        generator: as of `conversations`; None: the text family's.
    """
    from hpcrl.data.tokenizer import decoder, load_tokenizer
    from hpcrl.data.vision.reader import ImageReader, Preparation
    from hpcrl.rollout.generate import GroupGenerator, conversations

    model, settings = config.trainer.policy.model.pretrained, config.generator
    with importing_transformers(config):
        tokenizer = load_tokenizer(model, settings.chat_template)
        reader = ImageReader.of(model, Preparation.of(config.data), states)
    settings = replace(settings, max_input_length=config.max_input_length)
    kept = SampleImages(run, interval) if interval else None
    maker = partial(
        conversations, tokenizer, settings, config.environment, reader, kept, generator or GroupGenerator, model=model
    )
    return LoadedGenerator(maker, decoder(tokenizer))


def importing_transformers(config: Config) -> AbstractContextManager[None]:
    """Return the context in which a worker imports transformers: without torch, unless the user's own code may need models of transformers."""
    from hpcrl.data.tokenizer import without_torch

    return nullcontext() if config.names_own_code else without_torch()


def own_engine(config: Config) -> None:  # noqa: ARG001
    return None


def _check_entries(config: Config) -> None:
    model, changes = config.trainer.policy.model.pretrained, config.trainer.policy.config_overrides
    try:
        with importing_transformers(config):
            from transformers import PreTrainedConfig

            entries, _ = PreTrainedConfig.get_config_dict(model.path, **model.at_revision)
    except (OSError, ValueError) as error:
        raise DataError(f"the configuration of {model} cannot be loaded: {error}") from error
    for problem in (
        problem for family in families() for problem in family.check_entries(config, {**entries, **changes})
    ):
        raise DataError(f"{problem.path}: {problem.message}")
