"""Settings that may be a range of sizes, "1-4", of which each attempt takes one by the nodes that it was allocated."""

from __future__ import annotations

import re

from hpcrl.config.setting import Check
from hpcrl.errors import ConfigError

POLICY_NODES = "trainer.placement.policy_num_nodes"
NUM_ENGINES = "generator.inference_engine.num_engines"
NODES = "slurm.nodes"
GPUS = "slurm.gpus_per_node"
"""Size of a layout of one of slurm.requests whose nodes have another number of GPUs."""

_RANGE = re.compile(r"([1-9][0-9]{0,4})-([1-9][0-9]{0,4})")


def _is_size(value: int | str) -> bool:
    return isinstance(value, int) or bool((found := _RANGE.fullmatch(value)) and int(found[1]) <= int(found[2]))


SIZE = Check('expected a whole number, or a range of them such as "1-4", found {value!r}', _is_size)
"""Check of the value of such a setting."""


def sizes_in(value: int | str) -> range:
    """Return the sizes of a value that passes `SIZE`."""
    low, _, high = str(value).rpartition("-")
    return range(int(low or high), int(high) + 1)


def one_size(path: str, value: int | str) -> int:
    """Return the size of the setting `path` in the layout of an attempt. Raises ConfigError where it is still a range."""
    if isinstance(value, str):
        raise ConfigError(
            f"{path}: {value} is a range, of which only the attempts of a run take a size; expected a number, such as {path}={sizes_in(value)[-1]}"
        )
    return value
