"""Rules about ranks: how they share batches and samples, and which models share GPUs."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hpcrl.config.errors import Problem
from hpcrl.config.rules.megatron_layouts import shared_sample
from hpcrl.config.sections.trainer import TrainerConfig
from hpcrl.config.sections.tree import ConfigTree

_COLOCATED = "trainer.placement.colocate_all"


def _roles(trainer: TrainerConfig) -> dict[str, tuple[int, int]]:
    """Return ranks, and ranks that share each sample, of the models that there are."""
    roles = {"policy": (trainer.placement.policy_ranks, trainer.model_parallel_size)}
    if trainer.critic.model.path is not None:
        roles["critic"] = (trainer.placement.critic_ranks, trainer.critic_model_parallel_size)
    if trainer.colocated_reference:
        roles["ref"] = (trainer.placement.ref_ranks, trainer.ref_model_parallel_size)
    return roles


def _mini_batches(trainer: TrainerConfig) -> dict[str, int]:
    minis = {"policy": trainer.policy_mini_batch_size, "critic": trainer.critic_mini_batch_size}
    return {role: mini for role, mini in minis.items() if role in _roles(trainer)}


def whole_mini_batches(config: ConfigTree) -> Iterator[Problem]:
    batch = config.trainer.train_batch_size
    for role, mini in _mini_batches(config.trainer).items():
        if batch % mini:
            yield Problem(
                "trainer.train_batch_size",
                f"expected a multiple of trainer.{role}_mini_batch_size ({mini}), found {batch}",
            )


def _on_policy_ranks(trainer: TrainerConfig) -> list[str]:
    apart = {"policy", "critic"} if trainer.has_own_critic else {"policy"}
    return [role for role in _roles(trainer) if role not in apart]


def parallel_sizes(config: ConfigTree) -> Iterator[Problem]:
    for role, (ranks, together) in _roles(config.trainer).items():
        megatron = config.trainer.strategy == "megatron"
        if ranks % together and (megatron or role not in _on_policy_ranks(config.trainer)):
            megatron = megatron and role != "critic"
            shared = shared_sample(config.trainer.megatron_layout(role)) if megatron else together
            yield Problem(
                f"trainer.{role}.megatron_config" if megatron else f"trainer.{role}.sequence_parallel_size",
                f"{shared} ranks share each sample, which does not divide the {ranks} ranks (trainer.placement); make "
                "the ranks a multiple of it",
            )


def shared_tokens(config: ConfigTree) -> Iterator[Problem]:
    """Sequence parallelism of FSDP2: Megatron-core's is trainer.policy.megatron_config.context_parallel_size."""
    trainer = config.trainer
    if trainer.strategy == "megatron":
        return
    size = trainer.policy.sequence_parallel_size
    for role in _on_policy_ranks(trainer):
        own = getattr(trainer, role).sequence_parallel_size
        if own not in (None, size):
            yield Problem(
                f"trainer.{role}.sequence_parallel_size",
                f"expected {size}, as trainer.policy.sequence_parallel_size, because it has the policy's ranks and samples, found {own}; "
                "leave it out",
            )
    if not trainer.use_sample_packing and any(together > 1 for _, together in _roles(trainer).values()):
        yield Problem(
            "trainer.use_sample_packing",
            "ranks share the tokens of packed samples (trainer.policy.sequence_parallel_size), and not of padded rows; set it to true",
        )


def equal_shares(config: ConfigTree) -> Iterator[Problem]:
    if config.several_rows:  # how many is not known
        return
    samples, models = config.samples_per_prompt, _roles(config.trainer)
    for role, mini in _mini_batches(config.trainer).items():
        ranks, together = models[role]
        if mini * samples % max(1, ranks // together):
            of_each, least = f", {together} for each sample" if together > 1 else "", max(1, ranks // together)
            yield Problem(
                f"trainer.{role}_mini_batch_size",
                f"{_counted(mini, samples, config)} cannot be shared equally by {ranks} trainer ranks{of_each} (trainer.placement); "
                f"make {'it' if config.trainer.offline else 'the product'} a multiple of {least}",
            )


def enough_samples(config: ConfigTree) -> Iterator[Problem]:
    batch, samples = config.trainer.train_batch_size, config.samples_per_prompt
    ranks, together = _roles(config.trainer)["policy"]
    least = max(1, ranks // together)
    if batch * samples < least:
        yield Problem(
            "trainer.train_batch_size",
            f"{_counted(batch, samples, config)} are fewer than {least}, the least that trainer ranks can share; raise it, or use fewer ranks "
            "(trainer.placement)",
        )


def _counted(groups: int, samples: int, config: ConfigTree) -> str:
    if config.trainer.offline:
        return f"{groups} {'pairs' if config.trainer.pairwise else 'rows'}"
    return f"{groups} prompts x {samples} samples (generator.n_samples_per_prompt)"


def shared_gpus(config: ConfigTree) -> Iterator[Problem]:
    placement = config.trainer.placement
    with_policy = {"critic": placement.colocate_all, "ref": placement.colocate_all or placement.colocate_policy_ref}
    for role in [role for role in _roles(config.trainer) if with_policy.get(role)]:
        switch = "colocate_all" if role == "critic" or not placement.colocate_policy_ref else "colocate_policy_ref"
        for name in ("num_nodes", "num_gpus_per_node"):
            own, policy = getattr(placement, f"{role}_{name}"), getattr(placement, f"policy_{name}")
            if own not in (None, policy):
                yield Problem(
                    f"trainer.placement.{role}_{name}",
                    f"{own} differs from the policy's {policy}, whose GPUs it shares; leave it out or set "
                    f"trainer.placement.{switch}=false",
                )


def critic_apart(config: ConfigTree) -> Iterator[Problem]:
    placement = config.trainer.placement
    if config.trainer.has_own_critic and config.trainer.strategy == "megatron":
        unset = placement.critic_num_nodes is None
        yield Problem(
            f"trainer.placement.critic_{'num_gpus_per_node' if unset else 'num_nodes'}",
            'expected none with trainer.strategy="megatron", whose groups take all trainer ranks and whose sizes hold for a critic too; leave it '
            "out (critic beside the policy), or choose fsdp2",
        )


def colocated_engines(config: ConfigTree) -> Iterator[Problem]:
    engine, trainer = config.generator.inference_engine, config.trainer
    if not trainer.placement.colocate_all:
        return
    if trainer.offline:
        yield Problem(
            _COLOCATED,
            f'has no effect with trainer.mode="{trainer.mode}", whose steps wait for no engine; leave it out',
        )
        return
    sizes = (engine.tensor_parallel_size, engine.pipeline_parallel_size, engine.data_parallel_size)
    engines = engine.engines * math.prod(sizes)
    if engines != trainer.placement.policy_ranks:
        yield Problem(
            _COLOCATED,
            f"the engines use {engines} GPUs (num_engines x tensor, pipeline and data parallel size), the trainer "
            f"{trainer.placement.policy_ranks}; make them equal",
        )
    elif trainer.placement.policy_num_gpus_per_node % engine.gpus:
        yield Problem(
            "generator.inference_engine.tensor_parallel_size",
            f"with {_COLOCATED} the GPUs of a replica, {engine.gpus}, must divide those that the trainer has on a node, "
            f"{trainer.placement.policy_num_gpus_per_node} (trainer.placement.policy_num_gpus_per_node)",
        )
    if trainer.fully_async.sync_weight_interval > 1:
        yield Problem(
            "trainer.fully_async.sync_weight_interval",
            f"the trainer leaves its GPUs to the engines when it publishes weights ({_COLOCATED}): expected 1, found "
            f"{trainer.fully_async.sync_weight_interval}",
        )
    for path, value in (
        ("slurm.elastic.replicas", config.slurm.elastic.replicas),
        ("slurm.replicas_per_node", config.slurm.replicas_per_node),
    ):
        if value:
            yield Problem(path, f"engines are on the trainer's nodes, all of them ({_COLOCATED}); leave it out")
