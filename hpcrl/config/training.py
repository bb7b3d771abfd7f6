"""Rules about how models are kept, scheduled, adapted and profiled."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hpcrl.config.derive import trainer_ranks
from hpcrl.config.model import MixedPrecisionConfig
from hpcrl.config.problem import Problem

if TYPE_CHECKING:
    from hpcrl.config.root import Config


def reference_types(config: Config) -> Iterator[Problem]:
    precision = config.trainer.ref.fsdp_config.mixed_precision
    for name in ("reduce_dtype", "master_dtype"):
        if getattr(precision, name) != getattr(MixedPrecisionConfig(), name):
            yield Problem(
                f"trainer.ref.fsdp_config.mixed_precision.{name}",
                "has no effect: the reference is not trained and is kept in param_dtype; leave it out",
            )


def schedule(config: Config) -> Iterator[Problem]:
    for name in ("policy", "critic"):
        optimizer = getattr(config.trainer, name).optimizer_config
        path = f"trainer.{name}.optimizer_config"
        for setting in ("decay_ratio", "min_lr_factor"):
            if optimizer.scheduler == "constant_with_warmup" and getattr(optimizer, setting):
                yield Problem(
                    f"{path}.{setting}", f"has no effect with {path}.scheduler=constant_with_warmup, which never falls"
                )
        if optimizer.warmup_start_factor and not (optimizer.num_warmup_steps or optimizer.warmup_ratio):
            yield Problem(
                f"{path}.warmup_start_factor",
                f"has no effect without a warm-up; set {path}.num_warmup_steps or {path}.warmup_ratio",
            )


def recomputation(config: Config) -> Iterator[Problem]:
    trainer = config.trainer
    if trainer.gradient_checkpointing_use_reentrant and not trainer.gradient_checkpointing:
        yield Problem(
            "trainer.gradient_checkpointing_use_reentrant", "has no effect with trainer.gradient_checkpointing=false"
        )


def rotary_positions(config: Config) -> Iterator[Problem]:
    for section in ("trainer", "generator"):
        scaling = getattr(config, section).rope_scaling
        if scaling and not {"rope_type", "type"} & scaling.keys():
            yield Problem(
                f"{section}.rope_scaling", 'expected an entry rope_type, such as "linear", "yarn" or "llama3"'
            )


def frozen(config: Config) -> Iterator[Problem]:
    for pattern in config.trainer.policy.freeze_pattern:
        try:
            re.compile(pattern)
        except re.error as error:
            yield Problem("trainer.policy.freeze_pattern", f'"{pattern}" is not a regular expression: {error}')


def profiled_ranks(config: Config) -> Iterator[Problem]:
    profiler, ranks = config.trainer.profiler, trainer_ranks(config.trainer)
    wrong = [rank for rank in profiler.ranks if not 0 <= rank < ranks]
    if profiler.enable and (wrong or not profiler.ranks):
        yield Problem("trainer.profiler.ranks", f"expected trainer ranks from 0 to {ranks - 1}, found {profiler.ranks}")
