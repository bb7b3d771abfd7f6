"""Rules about models on nodes of their own that judge finished samples: teachers, the reference, a reward model."""

from __future__ import annotations

from collections.abc import Iterator

from hpcrl.config.adapters import reference_follows
from hpcrl.config.derive import MOST_KEPT, gpu_count, is_offline, mask_size, temperature, uses_reference
from hpcrl.config.errors import Problem
from hpcrl.config.scorers import REFERENCE, REWARD, TEACHER, scorer_sets
from hpcrl.config.sections.tree import ConfigTree

_TEACHER, _PLACEMENT = "trainer.distillation", "trainer.placement"
_COPIES = {
    TEACHER: f"{_TEACHER}.placement.num_replicas",
    REFERENCE: f"{_PLACEMENT}.ref_num_nodes",
    REWARD: "environment.reward_model.num_replicas",
}
_OF_BACKENDS = {
    "fsdp2": f"{_TEACHER}.placement.fsdp_size",
    "megatron": f"{_TEACHER}.placement",
    "vllm": f"{_TEACHER}.engine.tensor_parallel_size",
}
_RANKS = {
    REFERENCE: f"{_PLACEMENT}.ref_num_gpus_per_node",
    REWARD: "environment.reward_model.ranks_per_replica",
}


def teacher(config: ConfigTree) -> Iterator[Problem]:
    distillation = config.trainer.distillation
    if not distillation.enable or is_offline(config.trainer):
        return
    if distillation.top_k and config.trainer.strategy == "megatron":
        yield Problem(
            f"{_TEACHER}.top_k",
            f'expected 0 with trainer.strategy="megatron", found {distillation.top_k}; or choose fsdp2',
        )
    if distillation.backend == "vllm":
        yield from _engine(config)
    elif distillation.backend == "megatron":
        yield from _megatron(config)
    if distillation.model_path is None:
        yield Problem(f"{_TEACHER}.model_path", "required with trainer.distillation.enable: the teacher")
    if distillation.placement.fsdp_size < 1:
        yield Problem(
            f"{_TEACHER}.placement.fsdp_size",
            f"expected the number of ranks of one copy of the teacher, found {distillation.placement.fsdp_size}",
        )
    if not distillation.use_rewards and distillation.kl_penalty_coef == 0:
        yield Problem(
            f"{_TEACHER}.kl_penalty_coef",
            "0 without trainer.distillation.use_rewards would make every advantage 0; raise it, or set use_rewards=true",
        )
    if not distillation.use_rewards and config.trainer.critic.model.path is not None:
        yield Problem(
            "trainer.critic.model.path",
            "a critic learns from rewards, which count for nothing here; set trainer.distillation.use_rewards=true, or leave the critic out",
        )


def _megatron(config: ConfigTree) -> Iterator[Problem]:
    own, dtype = config.trainer.distillation, config.trainer.distillation.fsdp_config.mixed_precision.param_dtype
    if own.top_k:
        yield Problem(
            f"{_TEACHER}.top_k",
            f'expected 0 with backend="megatron", whose ranks each have a part of the vocabulary, found {own.top_k}; choose fsdp2 or vllm',
        )
    if dtype == "fp16":
        yield Problem(
            f"{_TEACHER}.fsdp_config.mixed_precision.param_dtype",
            'expected bf16 or fp32 with backend="megatron", found fp16',
        )


def _engine(config: ConfigTree) -> Iterator[Problem]:
    """vLLM knows prompts' log-probabilities of whole distributions at temperature 1 alone."""
    sampling, own, path = config.generator.sampling_params, config.trainer.distillation, f"{_TEACHER}.backend"
    if temperature(config) != 1:
        yield Problem(
            path,
            f"a vLLM engine gives log-probabilities of samples at temperature 1, and the policy has {temperature(config):g} "
            '(generator.sampling_params.temperature, trainer.algorithm.temperature); choose "fsdp2"',
        )
    if mask_size(sampling):
        yield Problem(
            path,
            "a vLLM engine gives log-probabilities of samples over the whole vocabulary, and sampling leaves tokens out "
            f'(generator.sampling_params.top_k = {sampling.top_k}); choose "fsdp2"',
        )
    if own.top_k > MOST_KEPT:
        yield Problem(f"{_TEACHER}.top_k", f'expected at most {MOST_KEPT} with backend="vllm", found {own.top_k}')


def reference_apart(config: ConfigTree) -> Iterator[Problem]:
    trainer, path = config.trainer, f"{_PLACEMENT}.colocate_policy_ref"
    if trainer.placement.colocate_policy_ref or trainer.placement.colocate_all:
        return
    if not uses_reference(trainer):
        yield Problem(
            path, "there is no reference model to have nodes of its own (trainer.algorithm.use_kl_loss); leave it out"
        )
    elif is_offline(trainer):
        yield Problem(path, f'expected true with trainer.mode="{trainer.mode}", whose reference is beside the policy')
    elif reference_follows(trainer):
        yield Problem(
            path,
            "expected true with a reference that follows the policy (trainer.algorithm.reference_reset_interval, trainer.update_ref_every_epoch)",
        )


def enough_scorers(config: ConfigTree) -> Iterator[Problem]:
    least, sets = config.slurm.min_scorers, scorer_sets(config)
    fewest = min(sets, key=lambda each: each.replicas, default=None)
    if fewest is not None and fewest.replicas < least:
        yield Problem(
            "slurm.min_scorers",
            f"expected at most {fewest.replicas}, the copies of the {fewest.title} ({_COPIES[fewest.role]}), found {least}",
        )


def ranks_of_scorers(config: ConfigTree) -> Iterator[Problem]:
    gpus = gpu_count(config.slurm)
    if not gpus or (config.trainer.distillation.placement.fsdp_size < 1):
        return
    for each in scorer_sets(config):
        if each.ranks > gpus:
            of_teacher = _OF_BACKENDS[config.trainer.distillation.backend]
            yield Problem(
                of_teacher if each.role == TEACHER else _RANKS[each.role],
                f"{each.ranks} ranks share a copy of the {each.title} on one node, which has {gpus} GPUs (slurm.gpus_per_node)",
            )
