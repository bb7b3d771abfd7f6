"""Layouts of a configuration with ranges: one for each combination of their sizes, with numbers in place of the ranges.

slurm.nodes is divided between trainer and replicas: of each number of nodes there are layouts, nearest to the ratio of the nodes that
policy_num_nodes and num_engines have.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from hpcrl.config.errors import Problem
from hpcrl.config.sections.tree import ConfigTree
from hpcrl.config.sizes import GPUS, NODES, NUM_ENGINES, POLICY_NODES, SIZE, sizes_in

_C = TypeVar("_C", bound=ConfigTree)

MOST_LAYOUTS = 256
_NEAREST = 4  # divisions of one number of nodes that are tried: ranks of the nearest may not share the batches equally


def ranges_of(config: ConfigTree) -> dict[str, range]:
    """Return the sizes of each setting that is a range, by its path; a text that is none counts as 1, so that rules can look at the rest."""
    if config.slurm.nodes is not None:
        found = list(_divisions(config)) or [dict.fromkeys(_values(config), 1)]
        return {path: range(min(own), max(own) + 1) for path in found[0] if (own := [sizes[path] for sizes in found])}
    texts = {path: value for path, value in _values(config).items() if isinstance(value, str)}
    return {path: _sizes(text) for path, text in texts.items()}


def _sizes(value: int | str | None, otherwise: int = 1) -> range:
    return range(otherwise, otherwise + 1) if value is None or SIZE.error(value) else sizes_in(value)


def _values(config: ConfigTree) -> dict[str, int | str]:
    placement, engine = config.trainer.placement, config.generator.inference_engine
    return {POLICY_NODES: placement.policy_num_nodes, NUM_ENGINES: engine.num_engines}


def with_sizes(config: _C, sizes: Mapping[str, int]) -> _C:
    """Return the configuration with sizes in place of its ranges, which does not grow, and with `GPUS` on each node where they are named.

    Other sizes of settings that are no ranges are passed over.
    """
    config = with_gpus(config, sizes.get(GPUS, config.slurm.gpus))
    chosen = {path: size for path, size in sizes.items() if path in ranges_of(config)}
    if chosen:
        config = replace(config, slurm=replace(config.slurm, grow_minutes=None))
    if (nodes := chosen.get(POLICY_NODES)) is not None:
        placement = replace(config.trainer.placement, policy_num_nodes=nodes)
        config = replace(config, trainer=replace(config.trainer, placement=placement))
    if (engines := chosen.get(NUM_ENGINES)) is not None:
        engine = replace(config.generator.inference_engine, num_engines=engines)
        config = replace(config, generator=replace(config.generator, inference_engine=engine))
    return replace(config, slurm=replace(config.slurm, nodes=None)) if chosen else config


def with_gpus(config: _C, gpus: int) -> _C:
    """Return the configuration for nodes with another number of GPUs; trainer and critic still have all of theirs where they have all of them."""
    if gpus == (present := config.slurm.gpus):
        return config
    placement = config.trainer.placement
    names = ("policy_num_gpus_per_node", "critic_num_gpus_per_node")
    own = {name: gpus for name in names if getattr(placement, name) == present}
    trainer = replace(config.trainer, placement=replace(placement, **own))
    return replace(config, trainer=trainer, slurm=replace(config.slurm, gpus_per_node=gpus))


def with_request(config: _C, request: str) -> _C:
    """Return the configuration with what one of slurm.requests asks for in place of slurm's own."""
    slurm = config.slurm.asked_by(request)
    return replace(with_gpus(config, slurm.gpus), slurm=slurm)


def combinations(config: ConfigTree) -> Iterator[dict[str, int]]:
    """Yield the sizes of each combination, the largest first; one without sizes where there is no range.

    Of slurm.nodes those of each number of nodes, the one nearest to the ratio first.
    """
    if config.slurm.nodes is not None:
        yield from _divisions(config)
        return
    ranges = ranges_of(config)
    for sizes in itertools.product(*(reversed(found) for found in ranges.values())):
        yield dict(zip(ranges, sizes, strict=True))


def _divisions(config: ConfigTree) -> Iterator[dict[str, int]]:
    placement, sizes = config.trainer.placement, {path: _sizes(value)[-1] for path, value in _values(config).items()}
    trainer, engines = sizes[POLICY_NODES], sizes[NUM_ENGINES]
    numbers = reversed(_sizes(config.slurm.nodes, _least_nodes(config)))
    if not _has_rollout_nodes(config):
        beside = {NUM_ENGINES: engines} if placement.colocate_all and config.has_engines else {}
        for number in numbers:
            yield {POLICY_NODES: number} | {path: number * count // trainer for path, count in beside.items()}
        return
    width, apiece = config.replicas_per_node, config.engine_nodes
    rollout = -(-engines // width) * apiece
    for number in numbers:
        fair = number * rollout / (trainer + rollout) / apiece
        counts = sorted(range(1, (number - 1) // apiece + 1), key=lambda count: abs(count - fair))
        for count in counts[:_NEAREST]:
            yield {POLICY_NODES: number - count * apiece, NUM_ENGINES: count * width}


def _has_rollout_nodes(config: ConfigTree) -> bool:
    shared = config.trainer.placement.colocate_all or config.generator.inference_engine.remote_urls
    return config.has_engines and not shared


def _least_nodes(config: ConfigTree) -> int:
    return 1 + config.engine_nodes * _has_rollout_nodes(config)


def problems_of_all(config: ConfigTree, check: Callable[[ConfigTree], list[Problem]]) -> list[Problem]:
    """Return nothing where a layout has no problems, else the problems of the largest one.

    Args:
        check: returns the problems of a configuration without ranges.
    """
    ranges, wrong, first = ranges_of(config), list(_of_ranges(config)), list[Problem]()
    if config.slurm.nodes is not None:
        ranges = {NODES: _sizes(config.slurm.nodes)}
    count = sum(1 for _ in combinations(config))
    if count == 0:
        return [
            Problem(
                NODES,
                f"expected at least {_least_nodes(config)}, one of them for the trainer, found {config.slurm.nodes}",
            )
        ]
    if count > MOST_LAYOUTS:
        return [Problem(path, f"expected at most {MOST_LAYOUTS} layouts, found {count}") for path in ranges]
    for sizes in combinations(config):
        found = check(with_sizes(config, sizes))
        if not found:
            return wrong
        first = first or found
    where = " or ".join(f"{path}={sizes[0]} to {sizes[-1]}" for path, sizes in ranges.items() if len(sizes) > 1)
    none = f" (of all layouts with {where} none works, and this is the largest)" if where else ""
    return [*wrong, *(replace(problem, message=f"{problem.message}{none}") for problem in first)]


def _of_ranges(config: ConfigTree) -> Iterator[Problem]:
    slurm = config.slurm
    for path, value in {**_values(config), NODES: slurm.nodes}.items():
        if isinstance(value, str) and (message := SIZE.error(value)):
            yield Problem(path, message)
        elif isinstance(value, str) and slurm.nodes is not None and path != NODES:
            yield Problem(path, f"expected a number with {NODES}, which divides nodes in the ratio of such numbers")
    if not ranges_of(config) and slurm.grow_minutes is not None:
        yield Problem("slurm.grow_minutes", f'needs a range of {NODES}, {POLICY_NODES} or {NUM_ENGINES}, such as "1-4"')
    if NUM_ENGINES in ranges_of(config) and slurm.elastic.replicas:
        yield Problem(
            NUM_ENGINES if slurm.nodes is None else NODES,
            "expected no range with slurm.elastic.replicas, which come and go within an attempt and are numbered after these",
        )
    if config.trainer.deterministic and len(ranges_of(config).get(POLICY_NODES, ())) > 1:
        yield Problem(
            POLICY_NODES if slurm.nodes is None else NODES,
            "expected one number of nodes of the trainer with trainer.deterministic: another one adds gradients in another order",
        )
    if slurm.nodes is not None and (config.trainer.has_own_critic or config.has_scorers or config.reward_services):
        yield Problem(
            NODES,
            "divides nodes between trainer and replicas alone, and this run has nodes of a critic, scorers or a reward model too; "
            f"set ranges of {POLICY_NODES} and {NUM_ENGINES} instead",
        )
