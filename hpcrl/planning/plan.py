"""Computes what `hpcrl plan` prints: nodes, groups of ranks, parameters, memory and disk of a configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from typing import Any

from hpcrl.config import Config
from hpcrl.config.rules.megatron_groups import Groups
from hpcrl.errors import DataError, RunError
from hpcrl.launch.doctor.disk_space import Sizes
from hpcrl.launch.layouts import AttemptLayout
from hpcrl.launch.nodes import Node, make_plan
from hpcrl.launch.pools import Pool, elastic_pools
from hpcrl.launch.submit.models import fetch_entries, folder_of
from hpcrl.planning.backend import describe_engines
from hpcrl.planning.colocation import leased_memory
from hpcrl.planning.devices import memory_of_rank
from hpcrl.planning.estimate import Estimate, estimate, estimate_critic
from hpcrl.planning.family import plan_family
from hpcrl.planning.memory import Need, Shapes, peak
from hpcrl.planning.rank_groups import rank_groups
from hpcrl.planning.served import Served, forward_need, served, served_shapes
from hpcrl.rundir.process_names import worker_name

ROLES = {"policy": "policy", "ref": "reference", "critic": "critic"}


@dataclass(frozen=True)
class ServedMemory:
    """Memory of a model that only computes.

    Attributes:
        shapes, need: parameters, and bytes of each process; None: not known.
        unknown: the reason; or empty.
        device: bytes of the device and where that number comes from, as of `memory_of_rank`.
    """

    model: Served
    shapes: Shapes | None = None
    need: Need | None = None
    unknown: str = ""
    device: tuple[float | None, str] = (None, "")

    def to_json(self) -> dict[str, Any]:
        value = {"name": self.model.what, "model": str(self.model.model), "processes": self.model.processes}
        value |= {"ranks_per_copy": self.model.ranks, "parameters": self.shapes and self.shapes.count}
        return value | {"memory": self.need and _memory({self.model.what: self.need}, self.device)}


@dataclass(frozen=True)
class RunPlan:
    """What a run with a configuration would have.

    Attributes:
        layouts: of an attempt, those that cannot work too; without ranges the only one.
        requests: layouts of each of slurm.requests, those that cannot work too.
        groups: of the trainer's ranks, by "policy" and "critic" and then by the name of the kind.
        disk: bytes of files; None: not known.
        models: parameters, by role; empty: not known, or the policy's family counts them itself.
        trainers: memory of the ranks that need most: of the policy's and, where a critic has its own, of the critic's.
        family: lines about a policy that is no language model, and the bytes of a rank by what they hold.
        engines: lines about a replica, and its numbers by name.
        unknown: why parameters or memory of the trainer are not known, by lines.
    """

    config: Config
    layouts: list[AttemptLayout]
    requests: Mapping[str, list[AttemptLayout]]
    nodes: list[Node]
    pools: list[Pool]
    groups: dict[str, dict[str, Groups]]
    disk: Sizes | None
    served: list[ServedMemory]
    models: Mapping[str, Shapes] = field(default_factory=dict)
    trainers: tuple[Estimate, ...] = ()
    family: tuple[list[str], dict[str, int]] | None = None
    engines: tuple[list[str], dict[str, int]] | None = None
    unknown: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: Config, layouts: list[AttemptLayout], requests: Mapping[str, list[AttemptLayout]]) -> RunPlan:
        """Compute the plan of a configuration without ranges, whose layout `check_layouts` accepts."""
        nodes, pools, groups = make_plan(config), elastic_pools(config), rank_groups(config.trainer)
        only = [_served(config, each) for each in served(config)]
        return cls(
            config, layouts, requests, nodes, pools, groups, Sizes.of(config, folder_of), only, **_models(config)
        )

    @property
    def counts(self) -> dict[str, list[int]]:
        """Parameters of a rank of each pipeline stage, by role."""
        return {role: counts for each in self.trainers for role, counts in each.counts.items()}

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values; docs/planning.md lists the keys."""
        placement, named = self.config.trainer.placement, self.config.trainer.models
        models = {
            role: {"class": shapes.kind, "model": str(named[role]), "parameters": shapes.count}
            | {"frozen": sum(weight.count for weight in shapes.weights if not weight.trained)}
            | {"on_a_rank": self.counts.get(role)}
            for role, shapes in self.models.items()
        }
        memory = [
            {"ranks": list(each.ranks), **_memory(each.needs, memory_of_rank(self.config, on_node))}
            for each, on_node in zip(self.trainers, (None, placement.critic_nodes[1]), strict=False)
        ]
        if self.config.shared_gpus and memory and (device := memory[0]["device"]) is not None:
            memory[0]["turns"] = [asdict(turn) for turn in leased_memory(self.config, self.trainers[0], device)]
        if self.family:
            device, source = memory_of_rank(self.config)
            parts = self.family[1]
            of_family = {
                "bytes": {"policy": parts},
                "total": sum(parts.values()),
                "device": device,
                "device_from": source,
            }
            memory = [{"ranks": list(range(placement.policy_ranks)), **of_family}]
        return {
            "layouts": _layouts(self.layouts),
            "requests": {name: _layouts(own) for name, own in self.requests.items()},
            "nodes": [_node(node) for node in self.nodes],
            "pools": [
                {
                    "name": pool.name,
                    "workers": pool.workers,
                    "partition": pool.asked.partition or self.config.slurm.partition,
                }
                for pool in self.pools
            ],
            "evaluation": self.config.slurm.evaluation.when,
            "evaluators": [worker_name(number) for number in self.config.evaluators],
            "groups": self.groups,
            "models": models,
            "memory": memory,
            "served": [each.to_json() for each in self.served],
            "replica": self.engines and self.engines[1],
            "disk": self.disk and asdict(self.disk),
            "unknown": [*self.unknown, *(each.unknown for each in self.served if each.unknown)],
        }


def _layouts(layouts: Sequence[AttemptLayout]) -> list[dict[str, Any]]:
    ranged = [layout for layout in layouts if layout.sizes]
    return [{"nodes": one.nodes, "sizes": one.sizes, "left_out": one.problem or None} for one in ranged]


def _node(node: Node) -> dict[str, Any]:
    ranks = list(range(node.first_rank, node.first_rank + node.ranks))
    value = {"node": node.index, "role": "critic" if node.critic else node.role, "ranks": ranks, "gpus": node.gpus}
    return value | {"workers": node.workers, "follows": node.follows}


def _memory(needs: Mapping[str, Need], device: tuple[float | None, str]) -> dict[str, Any]:
    of_each = {role: asdict(need) for role, need in needs.items()}
    total = peak(list(needs.values()))
    return {"bytes": of_each, "total": total, "device": device[0], "device_from": device[1]}


def _served(config: Config, each: Served) -> ServedMemory:
    if not fetch_entries(each.model):
        reason = f"{each.what}: {each.model} is not on this machine, so its parameters and memory are not known; its config.json alone would do"
        return ServedMemory(each, unknown=reason)
    if not _has_torch():
        reason = f"{each.what}: its parameters and memory are not known without torch and transformers, which this environment does not have"
        return ServedMemory(each, unknown=reason)
    shapes, device = served_shapes(config, each, folder_of), memory_of_rank(config, each.together)
    return ServedMemory(each, shapes, forward_need(config, each, shapes, device[0]), device=device)


def _models(config: Config) -> dict[str, Any]:
    """Return the fields of a RunPlan that depend on the trained models."""
    try:
        described = plan_family(config).describe_policy(config)
    except (ImportError, DataError, RunError) as error:
        return {"unknown": (f"policy: its parameters and memory are not known: {error}",)}
    if described is not None:
        return {"family": described}
    named = config.trainer.models
    here = {model: fetch_entries(model) for model in dict.fromkeys(named.values())}
    away = tuple(
        f"{ROLES[role]}: {model} is not on this machine, and the hub does not answer or has no such model, so parameters and memory are "
        "not known; its config.json alone would do"
        for role, model in named.items()
        if not here[model]
    )
    if away:
        return {"unknown": away}
    if not _has_torch():
        return {
            "unknown": (
                "parameters and memory: not known without torch and transformers, which this environment does not have",
            )
        }
    from hpcrl.planning.shapes import model_shapes

    models = model_shapes(config.trainer, folder_of)
    try:
        found = [estimate(config, models), estimate_critic(config, models)]
    except DataError as error:
        return {"unknown": (f"memory: {error}",)}
    trainers = tuple(each for each in found if each)
    return {"models": models, "trainers": trainers, "engines": describe_engines(config, models["policy"])}


def _has_torch() -> bool:
    return bool(find_spec("torch") and find_spec("transformers"))
