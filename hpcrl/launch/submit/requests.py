"""Layouts for which each of several requests asks for nodes (slurm.requests)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpcrl.config.sections.slurm import SlurmConfig
from hpcrl.config.sizes import sizes_in
from hpcrl.errors import DataError
from hpcrl.launch.layouts import AttemptLayout, describe_layouts, nodes_of, unmeasured_layouts, usable_layouts


def layouts_of_request(layouts: Sequence[AttemptLayout], request: str, nodes: int | str | None) -> list[AttemptLayout]:
    """Return the layouts for which a request asks for nodes. Raises DataError where there is none.

    Args:
        layouts: that fit into the request's GPUs, as of `usable_layouts`.
        nodes: of the request.
    """
    if nodes is None:
        return [*layouts]
    sizes = sizes_in(nodes)
    if found := [layout for layout in layouts if layout.nodes in sizes]:
        return found
    has = ", ".join(str(layout.nodes) for layout in unmeasured_layouts(layouts))
    raise DataError(
        f"slurm.requests.{request}.nodes: expected nodes for which the run has a layout ({has}), found {nodes!r}; with a range of "
        "trainer.placement.policy_num_nodes or generator.inference_engine.num_engines it has several"
    )


def working_layouts(layouts: Sequence[AttemptLayout], request: str) -> list[AttemptLayout]:
    """Return those of `usable_layouts`. Raises DataError where there is none.

    Args:
        request: that the layouts have to fit; empty: the only one.
    """
    if usable := usable_layouts(layouts):
        return usable
    whose = (
        f"slurm.requests.{request}: no layout of the run works on its nodes"
        if request
        else "no layout of the run works"
    )
    raise DataError("\n".join([whose, *describe_layouts(layouts)]))


def describe_requests(slurm: SlurmConfig, layouts: Mapping[str, Sequence[AttemptLayout]]) -> list[str]:
    """Return for each of several requests a line for people, and a table of its layouts where they are not those of the run.

    Args:
        layouts: all layouts of each request, as of `all_layouts`.

    Raises:
        DataError: there is none for which a request could ask for nodes.
    """
    lines = []
    for name, one in slurm.requests.items():
        asked = slurm.asked_by(name)
        own = [f"{what} {value}" for what in ("account", "qos", "constraint") if (value := getattr(asked, what))]
        gpus = [f"{asked.gpus_per_node} GPUs on each node"] if asked.gpus else []
        gpus += [f"each of {one.gpu_memory_gb:g} GB"] if asked.gpus and one.gpu_memory_gb is not None else []
        options = [f"--{option}" + ("" if value is True else f"={value}") for option, value in asked.extra.items()]
        own += [f"{nodes_of(layouts_of_request(working_layouts(layouts[name], name), name, one.nodes))} nodes"]
        where = f"partition {asked.partition or 'of the cluster'}"
        lines.append(f"request {name}: {', '.join([where, *own, f'{asked.time_minutes} minutes', *gpus, *options])}")
        if slurm.has_own_layouts(name):
            lines += [f"  {line}" for line in describe_layouts(layouts[name], requests=True)]
    return lines
