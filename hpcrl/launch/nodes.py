"""Assigns roles to nodes: trainers first, a critic's after the policy's, then replicas, then reward models, then scorers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

from hpcrl.config import Config
from hpcrl.config.scorers import ScorerSet, scorer_numbers, scorer_sets, scorers_per_node
from hpcrl.rundir.process_names import Role, scorer_name, worker_name


@dataclass(frozen=True)
class Node:
    """Roles of one node of a run.

    Attributes:
        ranks: trainer processes, one device each; 0 on a rollout node.
        first_rank: number of the first of them among all.
        critic: whether these train the critic alone.
        replicas: numbers of the engines on this node; beside ranks they have the same devices.
        lends: whether the trainer lends them its devices, and has them else.
        elsewhere: whether their engines are on no node of the run, and only their rollout workers are here.
        engine_parts: numbers of the parts of engines on this node, where an engine is on several and this is not the first of them.
        part_of: numbers of the engines that these are parts of.
        gpus: devices that the node uses; 0 where it computes on the CPU.
        gpu_offset: devices that the nodes before it use, for when all of them share one machine.
        services: numbers of the reward model's services on this node.
        scorers: numbers of the scorers on this node.
        title: what the model of the scorers on this node is, for people.
        scorer_ranks: processes of each of them here, one device each; or devices of its one process, where it has an engine.
        torchrun: whether they are several processes.
        part, parts: which of the nodes this is that share its scorer, and how many they are.
        spare: whether other nodes have scorers of the same model too.
        sandboxes: numbers of the servers of sandboxes on this node.
    """

    index: int
    role: Role
    ranks: int
    replicas: tuple[int, ...]
    gpus: int
    gpu_offset: int
    services: tuple[int, ...] = ()
    scorers: tuple[int, ...] = ()
    title: str = ""
    scorer_ranks: int = 1
    spare: bool = False
    torchrun: bool = False
    first_rank: int = 0
    critic: bool = False
    elsewhere: bool = False
    lends: bool = False
    engine_parts: tuple[int, ...] = ()
    part_of: tuple[int, ...] = ()
    part: int = 0
    parts: int = 1
    sandboxes: tuple[int, ...] = ()

    @property
    def workers(self) -> list[str]:
        """Names of the processes that are started again when they fail."""
        scorers = () if self.part else self.scorers
        numbers = {"rollout": self.replicas, "reward": self.services, "scorer": scorers, "part": self.engine_parts}
        numbers["sandbox"] = self.sandboxes  # after those that have devices
        return [f"{job}-{number}" for job, own in numbers.items() for number in own]

    def part_of_scorer(self, part: int) -> str:
        """Return the name of the process that has the ranks of this node's scorer on another one of its nodes."""
        return f"{scorer_name(self.scorers[0])}-part-{part}"

    @property
    def devices(self) -> list[list[str]]:
        """Names of the timelines of each device's processes; the first rank of a model stands for all of its ranks."""
        if self.ranks:
            beside = () if self.elsewhere else self.replicas
            rank = f"rank-{self.first_rank if self.critic else 0}"
            return [[rank, worker_name(replica)] for replica in beside] or [[rank]]
        names = {"rollout": self.replicas or self.part_of, "reward": self.services, "scorer": self.scorers}
        return [[f"{job}-{number}"] for job, own in names.items() for number in own]

    @property
    def follows(self) -> str | None:
        """The process here that has ranks of a scorer whose first ones are on another node, whose agent decides when it starts; None: there is none."""
        return self.part_of_scorer(self.part) if self.part else None


def make_plan(config: Config) -> list[Node]:
    """Return the nodes of a run, in the order of their Slurm node ids."""
    trainer, engine = config.trainer, config.generator.inference_engine
    on_gpu, nodes, offset = config.slurm.gpus > 0, list[Node](), 0

    def add(
        role: Role,
        devices: int,
        *,
        ranks: int = 0,
        replicas: Sequence[int] = (),
        services: Sequence[int] = (),
        critic: bool = False,
        engine_parts: Sequence[int] = (),
    ) -> None:
        nonlocal offset
        gpus, first_rank = devices if on_gpu else 0, sum(node.ranks for node in nodes)
        lends = bool(ranks and replicas) and trainer.placement.lend
        own = {"services": tuple(services), "first_rank": first_rank, "critic": critic, "lends": lends}
        of_engines = {"elsewhere": bool(engine.remote_urls and replicas), "engine_parts": tuple(engine_parts)}
        of_engines["part_of"] = tuple(number // (config.engine_nodes - 1) for number in engine_parts)
        nodes.append(Node(len(nodes), role, ranks, tuple(replicas), gpus, offset, **own, **of_engines))
        offset += gpus

    ranks, width = trainer.placement.policy_num_gpus_per_node, config.replicas_per_node
    for node in range(trainer.placement.policy_nodes):
        add("trainer", ranks, ranks=ranks, replicas=_beside(config, node))
    number, ranks = trainer.placement.critic_nodes
    for _ in range(number if trainer.has_own_critic else 0):
        add("trainer", ranks, ranks=ranks, critic=True)
    parts = config.engine_nodes
    apart = config.has_engines and not (trainer.placement.colocate_all or engine.remote_urls)
    for first in range(0, engine.engines if apart else 0, width):
        replicas = range(first, min(first + width, engine.engines))
        add("rollout", len(replicas) * engine.gpus // parts, replicas=replicas)
        for part in range(first * (parts - 1), (first + 1) * (parts - 1)):
            add("rollout", engine.gpus // parts, engine_parts=[part])
    services, width = range(config.reward_services), max(1, config.slurm.gpus)
    for first in services[::width]:
        own = services[first : first + width]
        add("reward", len(own), services=own)
    sets = scorer_sets(config)
    for each, (numbers, _) in zip(sets, scorer_numbers(sets), strict=True):
        width = scorers_per_node(config, each)
        for own in (numbers[at : at + width] for at in range(0, len(numbers), width)):
            for part in range(each.nodes):
                nodes.append(scorer_node(len(nodes), each, own, on_gpu=on_gpu, offset=offset, part=part))
                offset += nodes[-1].gpus
    return _with_sandboxes(nodes, config)


def _with_sandboxes(nodes: list[Node], config: Config) -> list[Node]:
    """Return the nodes, those with replicas with the number of a server of sandboxes, after those on nodes of their own."""
    asked = config.slurm.sandboxes
    if asked.per_rollout_node == 0:
        return nodes
    numbers, colocated = count(asked.nodes), config.trainer.placement.colocate_all
    return [
        replace(node, sandboxes=(next(numbers),)) if node.replicas and (colocated or node.role == "rollout") else node
        for node in nodes
    ]


def sandbox_node(index: int, server: int) -> Node:
    """Return a node that has nothing but a server of sandboxes."""
    return Node(index, "sandbox", 0, (), 0, 0, sandboxes=(server,))


def _beside(config: Config, node: int) -> range:
    engine, placement = config.generator.inference_engine, config.trainer.placement
    if engine.remote_urls and config.has_engines:
        return range(node, engine.engines, placement.policy_nodes)
    width = config.replicas_per_trainer_node
    here = range(node * width, (node + 1) * width)
    return here if placement.colocate_all else config.lent_replicas[here.start : here.stop]


def scorer_node(
    index: int, scorers: ScorerSet, numbers: Sequence[int], *, on_gpu: bool, offset: int, part: int = 0
) -> Node:
    """Return the node that has scorers of these numbers.

    Args:
        offset: devices that the nodes before it use.
        part: which one it is of the nodes that share them.
    """
    return Node(
        index,
        "scorer",
        0,
        (),
        len(numbers) * scorers.ranks_per_node if on_gpu else 0,
        offset,
        scorers=tuple(numbers),
        title=scorers.title,
        scorer_ranks=scorers.ranks_per_node,
        part=part,
        parts=scorers.nodes,
        spare=len(numbers) < scorers.copies,
        torchrun=scorers.ranks > 1 and not scorers.engine,
    )


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
            joined = "lent to" if node.lends else "in turns with"
            joined = "and, for engines elsewhere," if node.elsewhere else joined
            turns = f", {joined} {', '.join(node.workers)}" if node.replicas else ""
            what = f"critic, {_numbered(node)}" if node.critic else f"trainer, {node.ranks} rank(s)"
            lines.append(f"node {node.index}: {what}{also}{turns}{devices}")
        else:
            each = f", {node.scorer_ranks} rank(s) each" if node.scorers else ""
            if node.parts > 1:
                each = f", {node.scorer_ranks} of its {node.parts * node.scorer_ranks} ranks"
            names = node.workers or [scorer_name(number) for number in node.scorers]
            title = f" ({node.title})" if node.title else ""
            lines.append(f"node {node.index}: {', '.join(names)}{title}{each}{devices}")
    return lines


def _numbered(node: Node) -> str:
    last = node.first_rank + node.ranks - 1
    return f"rank {last}" if node.ranks == 1 else f"ranks {node.first_rank} to {last}"
