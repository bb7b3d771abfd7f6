"""Which node does what: trainers first, a critic's after the policy's, then replicas, then reward models, then scorers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hpcrl.config import Config, engine_gpus, replicas_per_node
from hpcrl.config.derive import critic_nodes, engine_nodes, gpu_count, has_engines, has_own_critic
from hpcrl.config.reward_model import reward_services, services_per_node
from hpcrl.config.scorers import scorer_sets, scorers_per_node

Role = Literal["trainer", "rollout", "reward", "scorer"]


@dataclass(frozen=True)
class Node:
    """What one node of a run does.

    Attributes:
        ranks: trainer processes, one device each; 0 on a rollout node.
        first_rank: number of the first of them among all.
        critic: whether these train the critic alone.
        replicas: numbers of the engines on this node; beside ranks they have the same devices.
        elsewhere: whether their engines are on no node of the run, and only their rollout workers are here.
        parts: numbers of the parts of engines on this node, where an engine is on several and this is not the first of them.
        gpus: devices that the node uses; 0 where it computes on the CPU.
        gpu_offset: devices that the nodes before it use, for when all of them share one machine.
        services: numbers of the reward model's services on this node.
        scorers: numbers of the scorers on this node.
        scorer_ranks: processes of each of them, one device each; or devices of its one process, where it has an engine.
        torchrun: whether they are several processes.
        spare: whether other nodes have scorers of the same model too.
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
    spare: bool = False
    torchrun: bool = False
    first_rank: int = 0
    critic: bool = False
    elsewhere: bool = False
    parts: tuple[int, ...] = ()

    @property
    def workers(self) -> list[str]:
        """Names of the processes that are started again when they fail."""
        numbers = {"rollout": self.replicas, "reward": self.services, "scorer": self.scorers, "part": self.parts}
        return [f"{job}-{number}" for job, own in numbers.items() for number in own]


def make_plan(config: Config) -> list[Node]:
    """Return the nodes of a run, in the order of their Slurm node ids."""
    trainer, engine = config.trainer, config.generator.inference_engine
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
        spare: bool = False,
        torchrun: bool = False,
        critic: bool = False,
        parts: Sequence[int] = (),
    ) -> None:
        nonlocal offset
        gpus, workers = devices if on_gpu else 0, (tuple(services), tuple(scorers), scorer_ranks, spare, torchrun)
        elsewhere = bool(engine.remote_urls and replicas)
        more = sum(node.ranks for node in nodes), critic, elsewhere, tuple(parts)
        nodes.append(Node(len(nodes), role, ranks, tuple(replicas), gpus, offset, *workers, *more))
        offset += gpus

    ranks, width = trainer.placement.policy_num_gpus_per_node, replicas_per_node(config)
    for node in range(trainer.placement.policy_num_nodes):
        add("trainer", ranks, ranks=ranks, replicas=_beside(config, node))
    number, ranks = critic_nodes(trainer)
    for _ in range(number if has_own_critic(trainer) else 0):
        add("trainer", ranks, ranks=ranks, critic=True)
    parts = engine_nodes(config)
    apart = has_engines(config) and not (trainer.placement.colocate_all or engine.remote_urls)
    for first in range(0, engine.num_engines if apart else 0, width):
        replicas = range(first, min(first + width, engine.num_engines))
        add("rollout", len(replicas) * engine_gpus(engine) // parts, replicas=replicas)
        for part in range(first * (parts - 1), (first + 1) * (parts - 1)):
            add("rollout", engine_gpus(engine) // parts, parts=[part])
    services, width = range(reward_services(config)), services_per_node(config)
    for first in services[::width]:
        own = services[first : first + width]
        add("reward", len(own), services=own)
    first = 0
    for each in scorer_sets(config):
        numbers, width = range(first, first + each.replicas), scorers_per_node(config, each.ranks)
        for own in (numbers[at : at + width] for at in range(0, len(numbers), width)):
            spare, torchrun = len(own) < each.replicas, each.ranks > 1 and not each.engine
            add("scorer", len(own) * each.ranks, scorers=own, scorer_ranks=each.ranks, spare=spare, torchrun=torchrun)
        first += each.replicas
    return nodes


def _beside(config: Config, node: int) -> range:
    """Return the replicas on one of the policy's nodes."""
    engine, placement = config.generator.inference_engine, config.trainer.placement
    if engine.remote_urls and has_engines(config):
        return range(node, engine.num_engines, placement.policy_num_nodes)
    width = placement.policy_num_gpus_per_node // engine_gpus(engine) if placement.colocate_all else 0
    return range(node * width, (node + 1) * width)


def trainer_nodes(plan: list[Node]) -> int:
    return sum(node.role == "trainer" for node in plan)


def needed_nodes(plan: list[Node], pooled: int) -> list[int]:
    """Return the nodes without which a run cannot go on; of replicas it may lose some, and of the copies of a scorer's model.

    Args:
        pooled: replicas of its elastic pool.
    """
    spare = pooled > 0 or sum(bool(node.replicas) for node in plan if node.role == "rollout") > 1
    return [node.index for node in plan if not (spare if node.role == "rollout" else node.spare)]


def describe_plan(plan: list[Node]) -> list[str]:
    """Return one line per node, for people."""
    lines = []
    for node in plan:
        devices = f", {node.gpus} GPU(s)" if node.gpus else ""
        if node.role == "trainer":
            also = " and the controller" if node.index == 0 else ""
            joined = "in turns with" if not node.elsewhere else "and, for engines elsewhere,"
            turns = f", {joined} {', '.join(node.workers)}" if node.replicas else ""
            what = f"critic, {_numbered(node)}" if node.critic else f"trainer, {node.ranks} rank(s)"
            lines.append(f"node {node.index}: {what}{also}{turns}{devices}")
        else:
            each = f", {node.scorer_ranks} rank(s) each" if node.scorers else ""
            lines.append(f"node {node.index}: {', '.join(node.workers)}{each}{devices}")
    return lines


def _numbered(node: Node) -> str:
    last = node.first_rank + node.ranks - 1
    return f"rank {last}" if node.ranks == 1 else f"ranks {node.first_rank} to {last}"


def describe_pool(config: Config) -> list[str]:
    """Return one line for the elastic pool, if there is one."""
    first, elastic = config.generator.inference_engine.num_engines, config.slurm.elastic
    if not elastic.replicas:
        return []
    names = ", ".join(f"rollout-{replica}" for replica in range(first, first + elastic.replicas))
    return [f"elastic: {names}, partition {elastic.partition or config.slurm.partition or 'of the cluster'}"]
