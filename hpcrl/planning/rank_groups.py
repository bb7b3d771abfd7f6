"""Formats the trainer's process groups and the nodes that they span."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from hpcrl.config import TrainerConfig
from hpcrl.config.rules.megatron_groups import Groups, ParallelLayout
from hpcrl.config.rules.megatron_layouts import product
from hpcrl.config.sections.model import FSDPConfig

_WORDS = {
    "TP": "tensor parallel",
    "CP": "context parallel",
    "DP": "data parallel",
    "PP": "pipeline",
    "ETP": "tensor parallel in experts",
    "EP": "expert parallel",
    "EDP": "copies of an expert",
}
_MOST_GROUPS, _MOST_RANKS = 4, 8
_TOGETHER, _EXPERTS = "ranks with the same samples", "ranks that share experts"
_FAST = {  # wait for each other in every layer
    "TP": "trainer.policy.megatron_config.tensor_model_parallel_size",
    "ETP": "trainer.policy.megatron_config.expert_tensor_parallel_size",
    _TOGETHER: "trainer.policy.sequence_parallel_size",
    _EXPERTS: "trainer.policy.fsdp_config.expert_parallel_size",
}


def describe_ranks(trainer: TrainerConfig) -> list[str]:
    """Return lines about the trainer's ranks and their groups, with warnings where a group is slow."""
    ranks, nodes = trainer.placement.policy_ranks, trainer.placement.policy_nodes
    on_node = trainer.placement.policy_num_gpus_per_node

    def node_of(rank: int) -> int:
        return rank // on_node

    where = f"{ranks} trainer rank(s), {on_node} on each of {nodes} node(s)"
    if trainer.strategy != "megatron":
        groups = rank_groups(trainer)["policy"]
        lines = [f"{where}, {trainer.strategy}", *_lines(groups, node_of), *_slow(groups, on_node)]
        if trainer.policy.fsdp_config.fsdp_size is None and nodes > 1:
            lines.append(
                "  or a copy on each node, where its state takes at most a third of the GPUs' memory (fsdp_config.fsdp_size)"
            )
        return lines + list(_critic(trainer))
    layout = ParallelLayout.of(trainer.policy.megatron_config, ranks)
    groups = rank_groups(trainer)["policy"]
    together = product(tensor=layout.tensor, context=layout.context, data=layout.data, pipeline=layout.pipeline)
    lines = [f"{where}, megatron: {together}"]
    if "EP" in groups:
        experts = product(
            tensor=layout.expert_tensor, expert=layout.expert, copies=layout.expert_data, pipeline=layout.pipeline
        )
        lines.append(f"  experts: {experts}")
    lines += _lines({f"{name} ({_WORDS[name]})": found for name, found in groups.items()}, node_of)
    return lines + list(_slow(groups, on_node))


def communicators(trainer: TrainerConfig) -> int:
    """Return how many process groups of several ranks a rank of the policy is in, each of which keeps memory of its GPU."""
    return sum(len(found[0]) > 1 for found in rank_groups(trainer)["policy"].values())


def rank_groups(trainer: TrainerConfig) -> dict[str, dict[str, Groups]]:
    """Return the groups of the policy's ranks and, where a critic has its own, of the critic's, each by the name of its kind."""
    placement, first = trainer.placement, trainer.placement.policy_ranks
    if trainer.strategy == "megatron":
        found = {"policy": _of_megatron(ParallelLayout.of(trainer.policy.megatron_config, first))}
    else:
        on_node, together = placement.policy_num_gpus_per_node, trainer.model_parallel_size
        found = {"policy": _of_fsdp(trainer.policy.fsdp_config, range(first), on_node, together)}
    if trainer.has_own_critic:
        ranks, together = range(first, first + placement.critic_ranks), trainer.critic_model_parallel_size
        found["critic"] = _of_fsdp(trainer.critic.fsdp_config, ranks, placement.critic_nodes[1], together)
    return found


def _of_fsdp(fsdp: FSDPConfig, ranks: range, on_node: int, together: int) -> dict[str, Groups]:
    groups = _copies(fsdp, ranks, on_node) | _consecutive(_TOGETHER, ranks, together)
    return groups | _consecutive(_EXPERTS, ranks, fsdp.expert_parallel_size)


def _of_megatron(layout: ParallelLayout) -> dict[str, Groups]:
    own = layout.expert > 1 or layout.expert_tensor != layout.tensor
    return {name: found for name, found in layout.groups().items() if own or name not in ("ETP", "EP", "EDP")}


def _critic(trainer: TrainerConfig) -> Iterator[str]:
    if not trainer.has_own_critic:
        return
    first, (nodes, on_node) = trainer.placement.policy_ranks, trainer.placement.critic_nodes
    ranks = range(first, first + nodes * on_node)
    yield f"{len(ranks)} rank(s) of the critic, {on_node} on each of {nodes} node(s)"
    before = trainer.placement.policy_nodes
    yield from _lines(rank_groups(trainer)["critic"], lambda rank: before + (rank - first) // on_node)


def _copies(fsdp: FSDPConfig, ranks: range, on_node: int) -> dict[str, Groups]:
    size = fsdp.copy_ranks(len(ranks), on_node)
    return {
        "one copy of the parameters": [tuple(ranks[at : at + size]) for at in range(0, len(ranks), size)],
        "ranks with the same part": [tuple(ranks[at::size]) for at in range(size)],
    }


def _consecutive(name: str, ranks: range, size: int) -> dict[str, Groups]:
    return {name: [tuple(ranks[at : at + size]) for at in range(0, len(ranks), size)]} if size > 1 else {}


def _lines(groups: dict[str, Groups], node_of: Callable[[int], int]) -> Iterator[str]:
    width = max(map(len, groups))
    for name, found in groups.items():
        size = len(found[0])
        shown = _several(found, node_of) if size > 1 else "each rank alone"
        yield f"  {name:{width}}  {len(found)} x {size}: {shown}" if size > 1 else f"  {name:{width}}  {shown}"


def _several(groups: Groups, node_of: Callable[[int], int]) -> str:
    shown = [f"{_ranks(group)} ({_nodes(group, node_of)})" for group in groups]
    if len(shown) > _MOST_GROUPS:
        shown = [*shown[: _MOST_GROUPS - 1], "…", shown[-1]]
    return ", ".join(shown)


def _ranks(group: Sequence[int]) -> str:
    if len(group) > 2 and group[-1] - group[0] == len(group) - 1:
        return f"{group[0]}-{group[-1]}"
    if len(group) > _MOST_RANKS:
        return f"{group[0]} {group[1]} {group[2]} … {group[-1]}"
    return " ".join(map(str, group))


def _nodes(group: Sequence[int], node_of: Callable[[int], int]) -> str:
    nodes = sorted(set(map(node_of, group)))
    return f"node {nodes[0]}" if len(nodes) == 1 else f"nodes {_ranks(nodes)}"


def _slow(groups: dict[str, Groups], on_node: int) -> Iterator[str]:
    for name, setting in _FAST.items():
        crossing = [group for group in groups.get(name, []) if group[0] // on_node != group[-1] // on_node]
        if crossing:
            what = name if name in (_TOGETHER, _EXPERTS) else f"{name} groups"
            yield (
                f"  warning: {what} cross nodes, such as {_ranks(crossing[0])} ({_nodes(crossing[0], lambda rank: rank // on_node)}), and wait for the "
                f"network in every layer; make {setting} a divisor of the {on_node} ranks of a node"
            )
