"""Layouts of each number of nodes that Slurm may allocate to an attempt of a run with ranges.

Of several layouts with as many nodes an attempt takes the last one, unless the waits of earlier attempts show that another one is faster
(hpcrl/launch/requeue/roles.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hpcrl.config import Config
from hpcrl.config.layouts import ranges_of, with_request
from hpcrl.config.sizes import GPUS
from hpcrl.launch.nodes import make_plan


@dataclass(frozen=True)
class AttemptLayout:
    """Sizes that an attempt may take.

    Attributes:
        nodes: that it needs.
        sizes: by the path of the setting: of ranges, and of GPUs of a node where a request has another number of them; else empty.
        problem: why it cannot work, or empty.
    """

    nodes: int
    sizes: dict[str, int] = field(default_factory=dict)
    problem: str = ""


Check = Callable[[Sequence[Config]], list[str]]
"""Returns for each configuration of a layout why it cannot work, or an empty text."""


def all_layouts(config: Config, *checks: Check, request: str = "") -> list[AttemptLayout]:
    """Return a layout for each combination of the sizes in range, the fewest nodes first; of one that cannot work its nodes are those of its sizes.

    Of those with as many nodes the last one is nearest to the ratio of the configuration: that of slurm.nodes, or the shares of the largest
    sizes differ least.

    Args:
        checks: what a layout must pass beside the rules of the configuration; called only where there are ranges.
        request: one of slurm.requests, into whose GPUs the layouts have to fit; empty: those of slurm.
    """
    gpus = dict[str, int]()
    if request:
        asked = with_request(config, request)
        gpus, config = ({GPUS: asked.slurm.gpus} if asked.slurm.gpus != config.slurm.gpus else {}), asked
    if not ranges_of(config) and not gpus:
        return [AttemptLayout(len(make_plan(config)))]
    found = []
    for sizes, problems in config.layouts():
        why = f"{problems[0].path}: {problems[0].message}" if problems else ""
        found.append(AttemptLayout(len(make_plan(config.at(sizes))), gpus | sizes, why))
    for check in checks:
        left = [at for at, layout in enumerate(found) if not layout.problem]
        for at, why in zip(left, check([config.at(found[at].sizes) for at in left]), strict=True):
            found[at] = replace(found[at], problem=why)
    if config.slurm.nodes is not None:
        return sorted(found, key=lambda layout: -layout.nodes)[::-1]
    most = {path: max(each.sizes[path] for each in found) for path in ranges_of(config)}

    def even(layout: AttemptLayout) -> tuple[float, list[int]]:
        shares = [layout.sizes[path] / largest for path, largest in most.items()]
        return min(shares, default=0.0) - max(shares, default=0.0), [*layout.sizes.values()]

    return sorted(found, key=lambda layout: (layout.nodes, *even(layout)))


def usable_layouts(layouts: Sequence[AttemptLayout]) -> list[AttemptLayout]:
    """Return those that work, in their order, without those that would leave devices of their nodes idle."""
    working = [layout for layout in layouts if not layout.problem]
    return [layout for layout in working if not any(_is_smaller(layout, other) for other in working)]


def unmeasured_layouts(layouts: Sequence[AttemptLayout]) -> list[AttemptLayout]:
    """Return of each number of nodes the layout that an attempt takes before the run has measured anything."""
    return [*{layout.nodes: layout for layout in layouts}.values()]


def _is_smaller(layout: AttemptLayout, other: AttemptLayout) -> bool:
    if layout.nodes != other.nodes or layout.sizes == other.sizes:
        return False
    return all(size <= other.sizes[path] for path, size in layout.sizes.items())


def layouts_for(layouts: Sequence[AttemptLayout], nodes: int) -> list[AttemptLayout]:
    """Return the largest layouts that these nodes have room for, all with as many nodes; the smallest ones where there is none."""
    most = max((layout.nodes for layout in layouts if layout.nodes <= nodes), default=layouts[0].nodes)
    return [layout for layout in layouts if layout.nodes == most]


def describe_layouts(layouts: Sequence[AttemptLayout], *, requests: bool = False) -> list[str]:
    """Return a table of the layouts for people; empty without ranges. Where no layout has a number of nodes, it has one that is left out.

    Args:
        requests: jobs of slurm.requests ask for the nodes.
    """
    if not layouts[0].sizes:
        return []
    used = usable_layouts(layouts)
    counts = {layout.nodes for layout in used}
    unusable = [layout for layout in layouts if layout.nodes not in counts]
    asked = f" (sbatch --nodes={nodes_of(used)})" if used and not requests else ""
    lines = [f"layouts: each attempt takes the largest one that its nodes have room for{asked}"]
    names = _short(layouts[0].sizes)
    lines.append("  " + "  ".join(["nodes", *names]))
    shown = unmeasured_layouts(used) + unmeasured_layouts(unusable)
    for layout in sorted(shown, key=lambda layout: layout.nodes):
        sizes = [f"{size:>{len(name)}}" for name, size in zip(names, layout.sizes.values(), strict=True)]
        line = "  ".join([f"{layout.nodes:>5}", *sizes])
        others = (
            [" ".join(map(str, one.sizes.values())) for one in layouts_for(used, layout.nodes)[:-1]] if used else []
        )
        moved = f"  or {', '.join(others)}" if others and not layout.problem else ""
        lines.append(f"  {line}" + (f"  left out: {layout.problem}" if layout.problem else moved))
    if len(used) > len(counts):
        lines.append("  or: sizes that an attempt takes once the measured waits show that its steps are then shorter")
    return lines


def nodes_of(layouts: Sequence[AttemptLayout]) -> int | str:
    """Return the nodes that `sbatch --nodes` asks for."""
    least, most = layouts[0].nodes, layouts[-1].nodes
    return most if least == most else f"{least}-{most}"


def _short(sizes: Mapping[str, int]) -> list[str]:
    return [path.rpartition(".")[2] for path in sizes]
