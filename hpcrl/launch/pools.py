"""Elastic pools of a run: job arrays beside its own, each element of which has one worker: a replica, a copy of a scorer's model, or a server
of sandboxes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpcrl.config import Config, ElasticConfig
from hpcrl.config.scorers import COPIES, POOLS, scorer_numbers, scorer_sets, scorers_per_node
from hpcrl.config.sections.slurm import SandboxesConfig
from hpcrl.errors import RunError
from hpcrl.launch.nodes import Node, make_plan, sandbox_node, scorer_node

ROLLOUT, SANDBOXES = "rollout", "sandboxes"


@dataclass(frozen=True)
class Pool:
    """One pool.

    Attributes:
        name: ROLLOUT, SANDBOXES, or what its scorers' findings are called (ScorerSet).
        what: its workers are besides, for people; or empty.
        setting: the section that asks for it.
        instead: the setting that says how many of the same start with the run.
        asked: that section.
        nodes: of each element the node that it has, by the number of the element.
        share: how many of them a node of the run would have.
    """

    name: str
    what: str
    setting: str
    instead: str
    asked: ElasticConfig | SandboxesConfig
    nodes: tuple[Node, ...]
    share: int

    @property
    def workers(self) -> list[str]:
        """Names of the workers, by the number of the element."""
        return [name for node in self.nodes for name in node.workers]

    @property
    def number(self) -> str:
        """The setting that says how many elements it has."""
        return f"{self.setting}.{'nodes' if self.name == SANDBOXES else 'replicas'}"

    @property
    def title(self) -> str:
        return "elastic pool" if self.name == ROLLOUT else f"elastic pool of {self.name}"

    def element(self, config: Config) -> tuple[int | None, int | None, bool]:
        """Return the request of an element, as of `SlurmConfig.element`."""
        if isinstance(self.asked, SandboxesConfig):
            return self.asked.cpus_per_task, self.asked.mem_gb, False
        return config.slurm.element(self.asked, self.share)


def elastic_pools(config: Config) -> list[Pool]:
    """Return the pools of a run that have elements."""
    engine, elastic, on_gpu = config.generator.inference_engine, config.slurm.elastic, config.slurm.gpus > 0
    first, found = len(make_plan(config)), list[Pool]()
    if elastic.replicas:
        replicas, gpus = range(engine.engines, engine.engines + elastic.replicas), engine.gpus
        nodes = [Node(first + at, "rollout", 0, (replica,), gpus * on_gpu, 0) for at, replica in enumerate(replicas)]
        instead, share = "generator.inference_engine.num_engines", config.replicas_per_node
        found.append(Pool(ROLLOUT, "", "slurm.elastic", instead, elastic, tuple(nodes), share))
        first += len(nodes)
    sets = scorer_sets(config)
    for each, (_, numbers) in zip(sets, scorer_numbers(sets), strict=True):
        if not numbers:
            continue
        nodes = [scorer_node(first + at, each, (number,), on_gpu=on_gpu, offset=0) for at, number in enumerate(numbers)]
        where, share = (POOLS[each.role], COPIES[each.role]), scorers_per_node(config, each)
        found.append(Pool(each.name, each.title, *where, each.pool, tuple(nodes), share))
        first += len(nodes)
    if config.slurm.sandboxes.nodes:
        asked = config.slurm.sandboxes
        nodes = tuple(sandbox_node(first + server, server) for server in range(asked.nodes))
        where = "slurm.sandboxes", "slurm.sandboxes.per_rollout_node"
        found.append(Pool(SANDBOXES, f"at most {asked.per_node} sandboxes each", *where, asked, nodes, 1))
    return found


def pool_of(config: Config, worker: str) -> Pool | None:
    """Return the pool that a worker belongs to; None: it starts with the run."""
    return next((pool for pool in elastic_pools(config) if worker in pool.workers), None)


def pooled_node(config: Config, worker: str) -> Node:
    """Return the node of a worker of a pool. Raises RunError where no pool of the configuration has it."""
    pool = pool_of(config, worker)
    if pool is None:
        raise RunError(
            f"{worker} is in no elastic pool of this configuration, which was changed since it was submitted"
        )
    return pool.nodes[pool.workers.index(worker)]


def with_few_cores(config: Config) -> list[str]:
    """Return the sections of pools, and of the evaluation job, on GPUs whose elements ask for no cores and take no whole nodes."""
    pools = elastic_pools(config)
    few = [
        pool.setting
        for pool in pools
        if not isinstance(pool.asked, SandboxesConfig) and config.slurm.has_scarce_elements(pool.asked, pool.share)
    ]
    asked = config.slurm.evaluation
    if asked.when != "never" and config.slurm.has_scarce_elements(asked, config.replicas_per_node):
        few.append("slurm.evaluation")
    return list(dict.fromkeys(few))


def describe_evaluation(config: Config) -> list[str]:
    """Return a line about the evaluation job, for people; none where there is none."""
    asked = config.slurm.evaluation
    if asked.when == "never":
        return []
    begins = "beside the run" if asked.when == "during" else "when the run's job has ended"
    partition = asked.partition or config.slurm.partition or "of the cluster"
    gpus = f", {config.generator.inference_engine.gpus} GPU(s) each" if config.slurm.gpus else ""
    return [f"evaluation: {asked.engines} engine(s) in a job of its own, {begins}, partition {partition}{gpus}"]


def describe_pools(pools: Sequence[Pool], config: Config) -> list[str]:
    """Return one line for each elastic pool, for people."""
    lines = []
    for pool in pools:
        partition = pool.asked.partition or config.slurm.partition or "of the cluster"
        of_what = f" ({pool.what})" if pool.what else ""
        lines.append(f"elastic: {', '.join(pool.workers)}{of_what}, partition {partition}")
    return lines
