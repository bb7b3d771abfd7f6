"""What follows from the configuration about scorers: processes that judge finished samples by a model that is not trained."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hpcrl.config.derive import (
    gpu_count,
    is_offline,
    longest_sample,
    micro_batch_tokens,
    model_config_kwargs,
    ref_model,
    ref_sharding,
    temperature,
    uses_reference,
)
from hpcrl.config.sections.distillation import DistillationConfig
from hpcrl.config.sections.model import FSDPConfig, Pretrained
from hpcrl.config.sections.trainer import TrainerConfig
from hpcrl.config.sections.tree import ConfigTree

ScorerRole = Literal["teacher", "reference"]
TEACHER, REFERENCE = "teacher", "reference"


@dataclass(frozen=True)
class ScorerSet:
    """The scorers that have the same model.

    Attributes:
        name: of what they find: another one where settings that decide what they find differ.
        replicas: copies of the model.
        ranks: processes that share one copy, on one node.
        sources: data sources of the groups that it judges; None: all that no other set of the role does.
    """

    role: ScorerRole
    name: str
    model: Pretrained
    replicas: int
    ranks: int
    sources: tuple[str, ...] | None = None


def role_of(name: str) -> str:
    """Return the role of the scorers whose findings have this name."""
    return name.rpartition("-")[0]


def has_own_reference(trainer: TrainerConfig) -> bool:
    """Return whether the reference model is on nodes of its own."""
    placement = trainer.placement
    return uses_reference(trainer) and not (placement.colocate_policy_ref or placement.colocate_all)


def trainer_has_reference(trainer: TrainerConfig) -> bool:
    """Return whether trainer ranks have the reference model beside the policy."""
    return uses_reference(trainer) and not has_own_reference(trainer)


def rewards_count(distillation: DistillationConfig) -> bool:
    """Return whether advantages are estimated from rewards: always but where a teacher takes their place."""
    return distillation.use_rewards or not distillation.enable


def learns_prompts(distillation: DistillationConfig) -> bool:
    """Return whether the tokens that the policy did not choose are learned too."""
    return distillation.enable and distillation.include_prompt


def teacher_models(distillation: DistillationConfig) -> dict[Pretrained, tuple[str, ...] | None]:
    """Return the teachers, each with the data sources that it judges, None for all others; empty: there is no teacher."""
    if not distillation.enable or distillation.model_path is None:
        return {}
    found: dict[Pretrained, tuple[str, ...] | None] = {
        Pretrained(distillation.model_path, distillation.model_revision): None
    }
    for source, path in distillation.source_models.items():
        own = found.get(model := Pretrained(path), ())
        found[model] = None if own is None else (*own, source)
    return found


def scorer_sets(config: ConfigTree) -> list[ScorerSet]:
    """Return the scorers of a run; those of teachers come first."""
    trainer, placement, found = config.trainer, config.trainer.placement, list[ScorerSet]()
    own = trainer.distillation
    for model, sources in ({} if is_offline(trainer) else teacher_models(own)).items():
        top = (own.top_k, own.top_k_from_teacher) if own.top_k else None
        name = _name(config, TEACHER, model, {}, own.fsdp_config, top)
        found.append(ScorerSet(TEACHER, name, model, own.placement.num_replicas, own.placement.fsdp_size, sources))
    if has_own_reference(trainer):
        model, nodes, ranks = ref_model(trainer), placement.ref_num_nodes, placement.ref_num_gpus_per_node
        name = _name(config, REFERENCE, model, model_config_kwargs(trainer.ref), ref_sharding(trainer))
        nodes = placement.policy_num_nodes if nodes is None else nodes
        ranks = placement.policy_num_gpus_per_node if ranks is None else ranks
        found.append(ScorerSet(REFERENCE, name, model, nodes, ranks))
    return found


def judges_of(sets: Sequence[ScorerSet], data_source: str) -> list[str]:
    """Return the names of what a group of a data source is to be scored with: one for each role."""
    names = dict[str, str]()
    for each in sets:
        if each.sources is None:
            names.setdefault(each.role, each.name)
        elif data_source in each.sources:
            names[each.role] = each.name
    return list(names.values())


def scorer_number(config: ConfigTree, number: int) -> ScorerSet:
    """Return the set that scorer `number` of a run belongs to."""
    for each in scorer_sets(config):
        if number < each.replicas:
            return each
        number -= each.replicas
    raise AssertionError("a run starts the scorers of its configuration")


def samples_at_once(config: ConfigTree, scorers: ScorerSet) -> int:
    """Return about how many samples a scorer claims: those of a group for each of its ranks at least, and of the reference those of a pass."""
    trainer, tokens = config.trainer, micro_batch_tokens(config)
    together = trainer.micro_forward_batch_size_per_gpu or trainer.micro_train_batch_size_per_gpu or 1
    of_pass = together if tokens is None else tokens // longest_sample(config)
    own = trainer.distillation.batch_size_per_replica if scorers.role == TEACHER else scorers.ranks * of_pass
    return max(own, scorers.ranks * config.generator.n_samples_per_prompt)


def scorers_per_node(config: ConfigTree, ranks: int) -> int:
    """Return how many scorers of so many ranks share a node; one where they compute on the CPU."""
    return max(1, gpu_count(config.slurm) // ranks)


def _name(
    config: ConfigTree,
    role: ScorerRole,
    model: Pretrained,
    changes: dict[str, Any],
    fsdp: FSDPConfig,
    top: tuple[int, bool] | None = None,
) -> str:
    trainer = config.trainer
    decides = {
        "model": vars(model),
        "changes": changes,
        "rope": [trainer.rope_scaling, trainer.rope_theta],
        "temperature": temperature(config),
        "top": top,
        "prompts": learns_prompts(trainer.distillation),
        "dtypes": [fsdp.mixed_precision.param_dtype, trainer.algorithm.logprob_dtype],
    }
    text = json.dumps(decides, sort_keys=True, default=str)
    return f"{role}-{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"
