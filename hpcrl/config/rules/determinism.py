"""Rules about trainer.deterministic: refuse what would let time or another layout decide what is trained."""

from __future__ import annotations

from collections.abc import Iterator

from hpcrl.config.backend import backend_of
from hpcrl.config.errors import Problem
from hpcrl.config.sections.trainer import TrainerConfig
from hpcrl.config.sections.tree import ConfigTree

DETERMINISTIC = "trainer.deterministic"


def has_bits_of_engine(trainer: TrainerConfig) -> bool:
    """Return whether the FSDP2 backend on CPUs computes the log-probabilities of the embedded engine to the last bit."""
    policy = trainer.policy
    return (
        trainer.deterministic
        and not trainer.offline
        and trainer.strategy == "fsdp2"
        and trainer.use_sample_packing
        and not trainer.shared_prefixes
        and policy.sequence_parallel_size == 1
        and (policy.model.lora.rank == 0 or policy.model.lora.has_bits_where_loaded)
        and policy.experts.router_replay == "none"
        and not (policy.compile_model or policy.use_torch_compile)
    )


def one_set_of_bits(config: ConfigTree) -> Iterator[Problem]:
    """Refuse settings by which an interrupted run would not have the bits of an uninterrupted one."""
    if not config.trainer.deterministic:
        return
    if others := [name for name in config.slurm.requests if config.slurm.has_own_layouts(name)]:
        yield Problem(
            f"slurm.requests.{others[0]}",
            f"another number of trainer ranks adds gradients in another order; give it the GPUs of the others, or leave {DETERMINISTIC} out",
        )
    if not config.trainer.offline:
        yield from _of_samples(config)


def _of_samples(config: ConfigTree) -> Iterator[Problem]:
    fully_async, engine = config.trainer.fully_async, config.generator.inference_engine
    if fully_async.max_staleness_steps:
        yield Problem(
            "trainer.fully_async.max_staleness_steps",
            f"which version generates a token would depend on time: expected 0 with {DETERMINISTIC}, found {fully_async.max_staleness_steps}",
        )
    if config.trainer.surplus_groups:
        yield Problem(
            "trainer.fully_async.oversampling_ratio",
            f"which groups a step trains would depend on which finish first: expected 1 with {DETERMINISTIC}, found "
            f"{fully_async.oversampling_ratio:g}",
        )
    if why := backend_of(engine).batch_dependence(config):
        yield Problem(
            "generator.inference_engine.backend", f"{why}; choose another engine, or leave {DETERMINISTIC} out"
        )
    if config.has_scorers or config.environment.uses_reward_service("train"):
        yield Problem(
            DETERMINISTIC,
            "teachers, a reference on nodes of its own and reward models score what comes together, and round by it. Leave them out, or set "
            "it to false",
        )
