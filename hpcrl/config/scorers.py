"""Derives the scorers of a configuration: processes that judge finished samples by a model that is not trained."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, Literal

from hpcrl.config.sections.distillation import IN_RANKS
from hpcrl.config.sections.model import FSDPConfig, Pretrained
from hpcrl.config.sections.slurm import ElasticConfig
from hpcrl.config.sections.tree import ConfigTree
from hpcrl.config.token_limits import longest_sample, micro_batch_tokens

ScorerRole = Literal["teacher", "reference", "reward"]
TEACHER, REFERENCE, REWARD = "teacher", "reference", "reward"
COPIES = {
    TEACHER: "trainer.distillation.placement.num_replicas",
    REFERENCE: "trainer.placement.ref_num_nodes",
    REWARD: "environment.reward_model.num_replicas",
}
"""The setting that says how many copies of a model start with the run."""
POOLS = {
    TEACHER: "slurm.elastic_scorers.teacher",
    REFERENCE: "slurm.elastic_scorers.reference",
    REWARD: "slurm.elastic_scorers.reward_model",
}
"""The section that asks for more of them."""
SECTIONS = {TEACHER: "trainer.distillation", REFERENCE: "trainer.ref", REWARD: "environment.reward_model"}
"""The section with what they compute with."""


@dataclass(frozen=True)
class ScorerSet:
    """The scorers that have the same model.

    Attributes:
        name: of what they find: another one where settings that decide what they find differ.
        replicas: copies of the model that start with the run.
        ranks: processes that share one copy.
        fsdp: how they do.
        engine: whether it is one process instead, with an engine on as many devices.
        sources: data sources of the groups that it judges; None: all that no other set of the role does.
        pool: what more copies ask for, in a job array of their own.
        nodes: that the ranks of a copy are on, equally many on each.
        sharing: ranks that share the tokens of each sample, with FSDP2.
    """

    role: ScorerRole
    name: str
    model: Pretrained
    replicas: int
    ranks: int
    fsdp: FSDPConfig
    sources: tuple[str, ...] | None = None
    engine: bool = False
    pool: ElasticConfig = field(default_factory=ElasticConfig)
    nodes: int = 1
    sharing: int = 1

    @property
    def ranks_per_node(self) -> int:
        """Of one copy."""
        return self.ranks // self.nodes

    @property
    def copies(self) -> int:
        """Copies of the model when all are there."""
        return self.replicas + self.pool.replicas

    @property
    def title(self) -> str:
        """Name of the model, for people."""
        return "reward model" if self.role == REWARD else self.role


def role_of(name: str) -> str:
    """Return the role of the scorers whose findings have this name."""
    return name.rpartition("-")[0]


def scorer_sets(config: ConfigTree) -> list[ScorerSet]:
    """Return the scorers of a run: those of teachers, of the reference, and of the reward model."""
    trainer, placement, found = config.trainer, config.trainer.placement, list[ScorerSet]()
    own = trainer.distillation
    engine, ranks, sharding = (
        own.backend not in IN_RANKS,
        own.ranks_per_replica,
        trainer.forward_sharding(own.fsdp_config),
    )
    for model, sources in ({} if trainer.offline else own.teachers).items():
        dtype = {"engine": own.engine.model_dtype} if engine else {}
        top = (own.top_k, own.top_k_from_teacher) if own.top_k else None
        name = _name(config, TEACHER, model, dtype, sharding, top)
        size = own.placement.num_replicas, ranks
        nodes = own.placement.nodes_per_replica
        sharing = own.placement.sequence_parallel_size if own.backend == "fsdp2" else 1
        found.append(ScorerSet(TEACHER, name, model, *size, sharding, sources, engine, nodes=nodes, sharing=sharing))
    if trainer.has_own_reference:
        model, nodes, ranks = trainer.ref_model, placement.ref_num_nodes, placement.ref_num_gpus_per_node
        fsdp = trainer.ref_sharding
        name = _name(config, REFERENCE, model, trainer.ref.config_overrides, fsdp)
        nodes = placement.policy_nodes if nodes is None else nodes
        ranks = placement.policy_num_gpus_per_node if ranks is None else ranks
        sharing = trainer.ref_model_parallel_size if trainer.strategy == "fsdp2" else 1
        found.append(ScorerSet(REFERENCE, name, model, nodes, ranks, fsdp, sharing=sharing))
    if (judge := config.scoring_reward_model) is not None:
        assert judge.model is not None
        model, fsdp = Pretrained(judge.model, judge.revision), trainer.forward_sharding(judge.fsdp_config)
        dtype = fsdp.mixed_precision.param_dtype
        name = _named(REWARD, {"model": vars(model), "template": judge.chat_template, "dtype": dtype})
        found.append(ScorerSet(REWARD, name, model, judge.num_replicas, judge.ranks_per_replica, fsdp))
    elastic = config.slurm.elastic_scorers
    pools = {TEACHER: elastic.teacher, REFERENCE: elastic.reference, REWARD: elastic.reward_model}
    return [replace(each, pool=pools[each.role]) for each in found]


def scorer_numbers(sets: Sequence[ScorerSet]) -> list[tuple[range, range]]:
    """Return the numbers of the scorers of each set: of those that start with the run, and of those of its pool, which come after all of the former."""
    counts = [each.replicas for each in sets] + [each.pool.replicas for each in sets]
    numbers = [range(*ends) for ends in pairwise([0, *accumulate(counts)])]
    return list(zip(numbers[: len(sets)], numbers[len(sets) :], strict=True))


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
    sets = scorer_sets(config)
    for each, own in zip(sets, scorer_numbers(sets), strict=True):
        if any(number in numbers for numbers in own):
            return each
    raise AssertionError("a run starts the scorers of its configuration")


def samples_at_once(config: ConfigTree, scorers: ScorerSet) -> int:
    """Return about how many samples a scorer claims: those of a group for each of its ranks at least, and of the reference those of a pass."""
    trainer, tokens = config.trainer, micro_batch_tokens(config)
    together = trainer.micro_forward_batch_size_per_gpu or trainer.micro_train_batch_size_per_gpu or 1
    of_pass = together if tokens is None else tokens // longest_sample(config)
    claimed = {
        TEACHER: trainer.distillation.batch_size_per_replica,
        REFERENCE: scorers.ranks * of_pass,
        REWARD: config.environment.reward_model.batch_size_per_replica,
    }
    return max(claimed[scorers.role], scorers.ranks * config.generator.n_samples_per_prompt)


def scorers_per_node(config: ConfigTree, scorers: ScorerSet) -> int:
    """Return how many of these scorers share a node; one where they compute on the CPU, or each of them has several nodes."""
    return 1 if scorers.nodes > 1 else max(1, config.slurm.gpus // scorers.ranks)


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
        "temperature": config.temperature,
        "top": top,
        "prompts": trainer.distillation.learns_prompts,
        "dtypes": [fsdp.mixed_precision.param_dtype, trainer.algorithm.logprob_dtype],
    }
    if role == TEACHER and trainer.distillation.cross_tokenizer:
        decides["aligned"] = vars(trainer.policy.model.pretrained)
    return _named(role, decides)


def _named(role: ScorerRole, decides: dict[str, Any]) -> str:
    text = json.dumps(decides, sort_keys=True, default=str)
    return f"{role}-{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"
