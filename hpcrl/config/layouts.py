"""Layouts of a configuration with ranges: one for each combination of their sizes, with numbers in place of the ranges."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from hpcrl.config.errors import Problem
from hpcrl.config.sections.tree import ConfigTree
from hpcrl.config.sizes import NUM_ENGINES, POLICY_NODES, SIZE, sizes_in

_C = TypeVar("_C", bound=ConfigTree)

MOST_LAYOUTS = 256


def ranges_of(config: ConfigTree) -> dict[str, range]:
    """Return the sizes of each setting that is a range, by its path; a text that is none counts as 1, so that rules can look at the rest."""
    texts = {path: value for path, value in _values(config).items() if isinstance(value, str)}
    return {path: range(1, 2) if SIZE.error(text) else sizes_in(text) for path, text in texts.items()}


def _values(config: ConfigTree) -> dict[str, int | str]:
    placement, engine = config.trainer.placement, config.generator.inference_engine
    return {POLICY_NODES: placement.policy_num_nodes, NUM_ENGINES: engine.num_engines}


def with_sizes(config: _C, sizes: Mapping[str, int]) -> _C:
    """Return the configuration with sizes in place of its ranges, which does not grow; sizes of settings that are no ranges are passed over."""
    chosen = {path: size for path, size in sizes.items() if path in ranges_of(config)}
    if chosen:
        config = replace(config, slurm=replace(config.slurm, grow_minutes=None))
    if (nodes := chosen.get(POLICY_NODES)) is not None:
        placement = replace(config.trainer.placement, policy_num_nodes=nodes)
        config = replace(config, trainer=replace(config.trainer, placement=placement))
    if (engines := chosen.get(NUM_ENGINES)) is not None:
        engine = replace(config.generator.inference_engine, num_engines=engines)
        config = replace(config, generator=replace(config.generator, inference_engine=engine))
    return config


def combinations(config: ConfigTree) -> Iterator[dict[str, int]]:
    """Yield the sizes of each combination, the largest first; one without sizes where there is no range."""
    ranges = ranges_of(config)
    for sizes in itertools.product(*(reversed(found) for found in ranges.values())):
        yield dict(zip(ranges, sizes, strict=True))


def problems_of_all(config: ConfigTree, check: Callable[[ConfigTree], list[Problem]]) -> list[Problem]:
    """Return nothing where a layout has no problems, else the problems of the largest one.

    Args:
        check: returns the problems of a configuration without ranges.
    """
    ranges, wrong, first = ranges_of(config), list(_of_ranges(config)), list[Problem]()
    if (count := math.prod(map(len, ranges.values()))) > MOST_LAYOUTS:
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
    for path, value in _values(config).items():
        if isinstance(value, str) and (message := SIZE.error(value)):
            yield Problem(path, message)
    if not ranges_of(config) and config.slurm.grow_minutes is not None:
        yield Problem("slurm.grow_minutes", f'needs a range of {POLICY_NODES} or {NUM_ENGINES}, such as "1-4"')
    if NUM_ENGINES in ranges_of(config) and config.slurm.elastic.replicas:
        yield Problem(
            NUM_ENGINES,
            "expected a number with slurm.elastic.replicas, which come and go within an attempt and are numbered after these",
        )
