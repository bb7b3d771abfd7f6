"""The trainer's process groups and the nodes that they span, as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpcrl.config import TrainerConfig, trainer_ranks
from hpcrl.config.derive import copy_ranks
from hpcrl.config.rules.megatron_groups import Groups, ParallelLayout
from hpcrl.config.rules.megatron_layouts import product

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
_FAST = ("TP", "ETP")  # wait for each other in every layer


def describe_ranks(trainer: TrainerConfig) -> list[str]:
    """Return lines about the trainer's ranks and their groups, with warnings where a group is slow."""
    ranks, nodes = trainer_ranks(trainer), trainer.placement.policy_num_nodes
    on_node = trainer.placement.policy_num_gpus_per_node
    where = f"{ranks} trainer rank(s), {on_node} on each of {nodes} node(s)"
    if trainer.strategy != "megatron":
        lines = [f"{where}, {trainer.strategy}", *_lines(_copies(trainer, ranks), on_node)]
        if trainer.policy.fsdp_config.fsdp_size is None and nodes > 1:
            lines.append(
                "  or a copy on each node, where its state takes at most a third of the GPUs' memory (fsdp_config.fsdp_size)"
            )
        return lines
    layout, groups = ParallelLayout.of(trainer.policy.megatron_config, ranks), {}
    together = product(tensor=layout.tensor, context=layout.context, data=layout.data, pipeline=layout.pipeline)
    lines = [f"{where}, megatron: {together}"]
    own = layout.expert > 1 or layout.expert_tensor != layout.tensor
    if own:
        experts = product(
            tensor=layout.expert_tensor, expert=layout.expert, copies=layout.expert_data, pipeline=layout.pipeline
        )
        lines.append(f"  experts: {experts}")
    groups = {name: found for name, found in layout.groups().items() if own or name not in ("ETP", "EP", "EDP")}
    lines += _lines({f"{name} ({_WORDS[name]})": found for name, found in groups.items()}, on_node)
    return lines + list(_slow(groups, on_node))


def _copies(trainer: TrainerConfig, ranks: int) -> dict[str, Groups]:
    size = copy_ranks(trainer.policy.fsdp_config.fsdp_size, ranks, trainer.placement.policy_num_gpus_per_node)
    return {
        "one copy of the parameters": [tuple(range(first, first + size)) for first in range(0, ranks, size)],
        "ranks with the same part": [tuple(range(first, ranks, size)) for first in range(size)],
    }


def _lines(groups: dict[str, Groups], on_node: int) -> Iterator[str]:
    width = max(map(len, groups))
    for name, found in groups.items():
        size = len(found[0])
        shown = _several(found, on_node) if size > 1 else "each rank alone"
        yield f"  {name:{width}}  {len(found)} x {size}: {shown}" if size > 1 else f"  {name:{width}}  {shown}"


def _several(groups: Groups, on_node: int) -> str:
    """Return groups with their nodes, the middle ones of many left out."""
    shown = [f"{_ranks(group)} ({_nodes(group, on_node)})" for group in groups]
    if len(shown) > _MOST_GROUPS:
        shown = [*shown[: _MOST_GROUPS - 1], "…", shown[-1]]
    return ", ".join(shown)


def _ranks(group: Sequence[int]) -> str:
    if len(group) > 2 and group[-1] - group[0] == len(group) - 1:
        return f"{group[0]}-{group[-1]}"
    if len(group) > _MOST_RANKS:
        return f"{group[0]} {group[1]} {group[2]} … {group[-1]}"
    return " ".join(map(str, group))


def _nodes(group: Sequence[int], on_node: int) -> str:
    nodes = sorted({rank // on_node for rank in group})
    return f"node {nodes[0]}" if len(nodes) == 1 else f"nodes {_ranks(nodes)}"


def _slow(groups: dict[str, Groups], on_node: int) -> Iterator[str]:
    for name in _FAST:
        crossing = [group for group in groups.get(name, []) if group[0] // on_node != group[-1] // on_node]
        if crossing:
            setting = "expert_tensor_parallel_size" if name == "ETP" else "tensor_model_parallel_size"
            yield (
                f"  warning: {name} groups cross nodes, such as {_ranks(crossing[0])} ({_nodes(crossing[0], on_node)}), and wait for the "
                f"network in every layer; make trainer.policy.megatron_config.{setting} a divisor of the {on_node} ranks of a node"
            )
