"""A trainer rank's learner and publisher, built from a run's configuration; of a run or of the replay of a step."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch

from hpcrl.config import Config, InferenceEngineConfig
from hpcrl.config.family import family_of
from hpcrl.config.token_limits import max_seq_len, micro_batch_tokens
from hpcrl.rundir.layout import Run
from hpcrl.trainer.backends.base import CriticEngine, PolicyEngine
from hpcrl.trainer.backends.build import build_critic
from hpcrl.trainer.batching import micro_batch_limits
from hpcrl.trainer.critic.ranks import ModelRanks, RemoteModel
from hpcrl.trainer.distributed import World, check_all_reduce
from hpcrl.trainer.family import trainer_family
from hpcrl.trainer.mismatch import MismatchLimit
from hpcrl.trainer.models.forward import DTYPES
from hpcrl.trainer.offline.validation import Validation
from hpcrl.trainer.saving.checkpoint import ResumePoint
from hpcrl.trainer.saving.dump import Dumps
from hpcrl.trainer.saving.publish import NoPublisher, Publisher
from hpcrl.trainer.scoring.rows import require_row_teacher
from hpcrl.trainer.step import Learner
from hpcrl.trainer.stop import StopConsensus

if TYPE_CHECKING:
    from hpcrl.trainer.saving.send import WeightSender


def load_learner(
    run: Run,
    config: Config,
    ranks: ModelRanks,
    consensus: StopConsensus,
    resume: Callable[[PolicyEngine, CriticEngine | None], ResumePoint],
    dumps: Dumps,
) -> Learner:
    """Return what trains a run's batches, as it was after the checkpoint that `resume` brings the engines to.

    Raises:
        DeviceError: the ranks do not reach each other as they should.
        ConfigError, RunError, CommitError: the model or the checkpoint cannot be loaded.
        Stopping: the run is to stop.
    """
    trainer, family = config.trainer, trainer_family(config)
    check_all_reduce(ranks.everyone)
    if trainer.teaches_rows and trainer.uses_reference:
        ranks.everyone.rank0_broadcast(lambda: require_row_teacher(config))
    consensus("load.policy")
    policy = family.load_policy(config, ranks.own) if ranks.policy else cast(PolicyEngine, RemoteModel())
    if ranks.same_models:
        consensus("load.critic")
    critic = build_critic(trainer, ranks.own) if ranks.critic else cast(CriticEngine, RemoteModel())
    consensus("load.checkpoint")
    start = resume(policy, critic)
    dumps.resume(start.step)
    flops = family.flops(config)
    limits = micro_batch_limits(trainer, micro_batch_tokens(config), flops.quadratic)
    return Learner(
        run,
        ranks,
        trainer,
        policy,
        critic,
        objective=family.objective(config),
        compares_logprobs=family_of(config).compares_logprobs(config),
        limits=limits,
        model_flops=flops,
        max_seq_len=max_seq_len(config),
        mismatch=MismatchLimit(config.generator.max_logprob_mismatch, config.generator.on_logprob_mismatch),
        dumps=dumps,
        consensus=consensus,
        start=start,
        validation=Validation.of(run, config, limits) if trainer.offline else None,
    )


def build_publisher(run: Run, attempt: int, config: Config, ranks: ModelRanks) -> Publisher:
    """Return the publisher of this rank's share of weight versions and exports."""
    if not ranks.policy:
        return NoPublisher()
    engine, engines = config.generator.inference_engine, config.has_engines
    return Publisher(
        run, attempt, ranks.own, DTYPES[engine.model_dtype], config.trainer.fully_async.kept_versions, config.max_model_len,
        adapters=config.loads_adapters, engines=engines, full_interval=engine.full_weights_interval,
        sender=_weight_sender(run, attempt, ranks.own, engine) if engines else None,
    )  # fmt: skip


def _weight_sender(run: Run, attempt: int, world: World, engine: InferenceEngineConfig) -> WeightSender | None:
    if engine.weight_sync_backend == "filesystem":
        return None
    from hpcrl.trainer.saving.send import WeightSender

    device = world.device if engine.weight_sync_backend == "nccl" else torch.device("cpu")
    return WeightSender(
        run, attempt, world.rank, device, os.environ["HPCRL_ADDRESS"], engine.weight_sync_timeout_seconds
    )
