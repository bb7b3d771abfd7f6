"""Chooses the layout of each number of nodes that Slurm may allocate to an attempt of a run with ranges."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hpcrl.config import Config
from hpcrl.config.layouts import ranges_of
from hpcrl.launch.nodes import make_plan


@dataclass(frozen=True)
class AttemptLayout:
    """Sizes that an attempt may take.

    Attributes:
        nodes: that it needs.
        sizes: by the path of the setting; empty where the configuration has no ranges.
        problem: why it cannot work, or empty.
    """

    nodes: int
    sizes: dict[str, int] = field(default_factory=dict)
    problem: str = ""


Check = Callable[[Sequence[Config]], list[str]]
"""Returns for each configuration of a layout why it cannot work, or an empty text."""


def all_layouts(config: Config, *checks: Check) -> list[AttemptLayout]:
    """Return a layout for each combination of the sizes in range, the fewest nodes first; of one that cannot work its nodes are those of its sizes.

    Args:
        checks: what a layout must pass beside the rules of the configuration; called only where there are ranges.
    """
    if not ranges_of(config):
        return [AttemptLayout(len(make_plan(config)))]
    found = []
    for sizes, problems in config.layouts():
        why = f"{problems[0].path}: {problems[0].message}" if problems else ""
        found.append(AttemptLayout(len(make_plan(config.at(sizes))), sizes, why))
    for check in checks:
        left = [at for at, layout in enumerate(found) if not layout.problem]
        for at, why in zip(left, check([config.at(found[at].sizes) for at in left]), strict=True):
            found[at] = replace(found[at], problem=why)
    if config.slurm.nodes is not None:
        found = _nearest(found)
    return sorted(found, key=lambda layout: (layout.nodes, *layout.sizes.values()))


def _nearest(layouts: Sequence[AttemptLayout]) -> list[AttemptLayout]:
    """Return for each number of nodes the first layout that works, and where there is none the first."""
    found = dict[int, AttemptLayout]()
    for layout in layouts:
        before = found.setdefault(layout.nodes, layout)
        if before.problem and not layout.problem:
            found[layout.nodes] = layout
    return list(found.values())


def usable_layouts(layouts: Sequence[AttemptLayout]) -> list[AttemptLayout]:
    """Return one layout for each number of nodes, the fewest first.

    Of several that work, one that is smaller than another is left out; then the one whose shares of the largest sizes differ least is taken.
    """
    most = {path: max(each.sizes[path] for each in layouts) for path in layouts[0].sizes}

    def uneven(layout: AttemptLayout) -> tuple[float, list[int]]:
        shares = [size / most[path] for path, size in layout.sizes.items()]
        return max(shares) - min(shares), [-size for size in layout.sizes.values()]

    working = [layout for layout in layouts if not layout.problem]
    best = dict[int, AttemptLayout]()
    for layout in working:
        if any(_is_smaller(layout, other) for other in working):  # it would leave devices of these nodes idle
            continue
        other = best.get(layout.nodes)
        if other is None or (layout.sizes and uneven(layout) < uneven(other)):
            best[layout.nodes] = layout
    return [best[nodes] for nodes in sorted(best)]


def _is_smaller(layout: AttemptLayout, other: AttemptLayout) -> bool:
    if layout.nodes != other.nodes or layout.sizes == other.sizes:
        return False
    return all(size <= other.sizes[path] for path, size in layout.sizes.items())


def layout_for(layouts: Sequence[AttemptLayout], nodes: int) -> AttemptLayout:
    """Return the largest layout that these nodes have room for; the smallest one where there is none."""
    fitting = [layout for layout in layouts if layout.nodes <= nodes]
    return fitting[-1] if fitting else layouts[0]


def describe_layouts(layouts: Sequence[AttemptLayout]) -> list[str]:
    """Return a table of the layouts for people; empty without ranges. Where no layout has a number of nodes, it has those that are left out."""
    if not layouts[0].sizes:
        return []
    used = usable_layouts(layouts)
    counts = {layout.nodes for layout in used}
    asked = f" (sbatch --nodes={nodes_of(used)})" if used else ""
    lines = [f"layouts: each attempt takes the largest one that its nodes have room for{asked}"]
    names = _short(layouts[0].sizes)
    lines.append("  " + "  ".join(["nodes", *names]))
    for layout in layouts:
        if layout in used or layout.nodes not in counts:
            sizes = [f"{size:>{len(name)}}" for name, size in zip(names, layout.sizes.values(), strict=True)]
            line = "  ".join([f"{layout.nodes:>5}", *sizes])
            lines.append(f"  {line}" + (f"  left out: {layout.problem}" if layout.problem else ""))
    return lines


def nodes_of(layouts: Sequence[AttemptLayout]) -> int | str:
    """Return the nodes that `sbatch --nodes` asks for."""
    least, most = layouts[0].nodes, layouts[-1].nodes
    return most if least == most else f"{least}-{most}"


def _short(sizes: Mapping[str, int]) -> list[str]:
    return [path.rpartition(".")[2] for path in sizes]
