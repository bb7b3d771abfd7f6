"""Which node does what: trainers first, then replicas, then reward models, then scorers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hpcrl.config import Config, engine_gpus, replicas_per_node
from hpcrl.config.derive import gpu_count, has_engines
from hpcrl.config.reward_model import reward_services, services_per_node
from hpcrl.config.scorers import scorer_sets, scorers_per_node

Role = Literal["trainer", "rollout", "reward", "scorer"]


@dataclass(frozen=True)
class Node:
    """What one node of a run does.

    Attributes:
        ranks: trainer processes, one device each; 0 on a rollout node.
        replicas: numbers of the engines on this node; beside ranks they have the same devices.
        gpus: devices that the node uses; 0 where it computes on the CPU.
        gpu_offset: devices that the nodes before it use, for when all of them share one machine.
        services: numbers of the reward model's services on this node.
        scorers: numbers of the scorers on this node.
        scorer_ranks: processes of each of them, one device each.
    """

    index: int
    role: Role
    ranks: int
    replicas: tuple[int, ...]
    gpus: int
    gpu_offset: int
    services: tuple[int, ...] = ()
    scorers: tuple[int, ...] = ()
    scorer_ranks: int = 1

    @property
    def workers(self) -> list[str]:
        """Names of the processes that are started again when they fail."""
        numbers = {"rollout": self.replicas, "reward": self.services, "scorer": self.scorers}
        return [f"{job}-{number}" for job, own in numbers.items() for number in own]


def make_plan(config: Config) -> list[Node]:
    """Return the nodes of a run, in the order of their Slurm node ids."""
    placement, engine = config.trainer.placement, config.generator.inference_engine
    on_gpu, nodes, offset = gpu_count(config.slurm) > 0, list[Node](), 0

    def add(
        role: Role,
        devices: int,
        *,
        ranks: int = 0,
        replicas: Sequence[int] = (),
        services: Sequence[int] = (),
        scorers: Sequence[int] = (),
        scorer_ranks: int = 1,
    ) -> None:
        nonlocal offset
        gpus, workers = devices if on_gpu else 0, (tuple(services), tuple(scorers), scorer_ranks)
        nodes.append(Node(len(nodes), role, ranks, tuple(replicas), gpus, offset, *workers))
        offset += gpus

    ranks, width = placement.policy_num_gpus_per_node, replicas_per_node(config)
    beside = ranks // engine_gpus(engine) if placement.colocate_all else 0
    for node in range(placement.policy_num_nodes):
        add("trainer", ranks, ranks=ranks, replicas=range(node * beside, (node + 1) * beside))
    apart = engine.num_engines if has_engines(config) and not placement.colocate_all else 0
    for first in range(0, apart, width):
        replicas = range(first, min(first + width, engine.num_engines))
        add("rollout", len(replicas) * engine_gpus(engine), replicas=replicas)
    services, width = range(reward_services(config)), services_per_node(config)
    for first in services[::width]:
        own = services[first : first + width]
        add("reward", len(own), services=own)
    first = 0
    for each in scorer_sets(config):
        numbers, width = range(first, first + each.replicas), scorers_per_node(config, each.ranks)
        for own in (numbers[at : at + width] for at in range(0, len(numbers), width)):
            add("scorer", len(own) * each.ranks, scorers=own, scorer_ranks=each.ranks)
        first += each.replicas
    return nodes


def trainer_nodes(plan: list[Node]) -> int:
    return sum(node.role == "trainer" for node in plan)


def needed_nodes(plan: list[Node]) -> list[int]:
    """Return the nodes without which a run cannot go on; of replicas it may lose some."""
    return [node.index for node in plan if node.role != "rollout"]


def describe_plan(plan: list[Node]) -> list[str]:
    """Return one line per node, for people."""
    lines = []
    for node in plan:
        devices = f", {node.gpus} GPU(s)" if node.gpus else ""
        if node.role == "trainer":
            also = " and the controller" if node.index == 0 else ""
            turns = f", in turns with {', '.join(node.workers)}" if node.replicas else ""
            lines.append(f"node {node.index}: trainer, {node.ranks} rank(s){also}{turns}{devices}")
        else:
            each = f", {node.scorer_ranks} rank(s) each" if node.scorers else ""
            lines.append(f"node {node.index}: {', '.join(node.workers)}{each}{devices}")
    return lines


def describe_pool(config: Config) -> list[str]:
    """Return one line for the elastic pool, if there is one."""
    first, elastic = config.generator.inference_engine.num_engines, config.slurm.elastic
    if not elastic.replicas:
        return []
    names = ", ".join(f"rollout-{replica}" for replica in range(first, first + elastic.replicas))
    return [f"elastic: {names}, partition {elastic.partition or config.slurm.partition or 'of the cluster'}"]
