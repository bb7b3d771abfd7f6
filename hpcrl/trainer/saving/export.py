"""A checkpoint as a model that others load, made by one process on the CPU while no training is needed."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpcrl.config import Config, FSDPConfig
from hpcrl.config.family import family_of
from hpcrl.config.rules.megatron_groups import on_one_rank
from hpcrl.config.sections.trainer import TrainerConfig
from hpcrl.rundir.layout import Run, position_of
from hpcrl.trainer.distributed import joined
from hpcrl.trainer.family import trainer_family
from hpcrl.trainer.models.forward import DTYPES
from hpcrl.trainer.saving.publish import Publisher

_ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}


def export_checkpoint(run: Run, checkpoint: Path, target: Path) -> None:
    """Write the policy of a checkpoint to `target`: weights under Hugging Face names, configuration and tokenizer.

    Raises:
        DataError: the model that the run started from is gone; its configuration and tokenizer are needed.
        RunError: the run trains with Megatron-core, which is not installed here.
        CommitError: `target` could not be written.
    """
    os.environ |= _ALONE | {"CUDA_VISIBLE_DEVICES": ""}
    config = Config.from_toml([run.config])
    position = position_of(checkpoint)
    assert position is not None, checkpoint
    with joined() as world:
        alone = replace(config, trainer=_alone(config.trainer))
        engine = trainer_family(config).load_policy(alone, world)
        engine.restore_weights(checkpoint)
        dtype = DTYPES[config.generator.inference_engine.model_dtype]
        publisher = Publisher(run, 0, world, dtype, config.trainer.fully_async.kept_versions)
        publisher.export(engine, position[0], target=target, **exported_with(config))


def exported_with(config: Config) -> dict[str, Any]:
    """Return the arguments of `Publisher.export` that follow from the settings."""
    return {
        "model": config.trainer.policy.model.pretrained if family_of(config).exports_tokenizer else None,
        "template": config.generator.chat_template,
        "options": config.generator.chat_template_kwargs,
        "texts": config.trainer.offline and config.data.format == "text",
    }


def _alone(trainer: TrainerConfig) -> TrainerConfig:
    """Return the section for one process that trains nothing: no reference, and no sharding over ranks that are not there."""
    policy = trainer.policy
    sharding = FSDPConfig(mixed_precision=policy.fsdp_config.mixed_precision)
    return replace(
        trainer,
        policy=replace(
            policy,
            fsdp_config=sharding,
            megatron_config=on_one_rank(policy.megatron_config),
            use_torch_compile=False,
            compile_model=False,
        ),
        algorithm=replace(trainer.algorithm, use_kl_loss=False, use_kl_in_reward=False),
    )
