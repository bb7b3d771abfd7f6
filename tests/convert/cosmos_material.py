"""Cosmos-RL's files, and how their conversions are looked at."""

from typing import Any

import tomli_w

from hpcrl.convert.conversion import Conversion, Entry
from hpcrl.convert.cosmos.convert import convert_toml
from tests.paths import ROOT

SPEC = ROOT / "tests" / "spec" / "cosmos"


FILES = [*sorted((SPEC / "configs").glob("*.toml")), *sorted((SPEC / "extras").glob("*.toml"))]


REFUSED = {
    "invalid_duplicate_key": "a key that is set twice: train.master_dtype stands in line 17 already",
    "reward_service": "this is the configuration of Cosmos-RL's reward service",
    "wfm_grpo_foreign_schema": "this is a configuration of Cosmos' world foundation models (WFM)",
}


CONVERTED = [path for path in FILES if path.stem not in REFUSED]


def converted(name: str) -> Conversion:
    (path,) = [path for path in FILES if path.stem.startswith(name)]
    return convert_toml(path.read_text(), path.name)


def of(tree: dict[str, Any]) -> Conversion:
    """Convert nested tables; a dataset is named in them, and a batch of one group, where nothing else is said."""
    tree.setdefault("train", {}).setdefault("train_batch_per_replica", 16)
    tree["train"].setdefault("train_policy", {"type": "grpo"}).setdefault("dataset", {"name": "org/data"})
    return convert_toml(tomli_w.dumps(tree), "source.toml")


def entries(conversion: Conversion, source: str) -> list[Entry]:
    return [entry for entry in conversion.entries if entry.source == source]


def conflicts(conversion: Conversion) -> dict[str, str]:
    return {entry.source: entry.message for entry in conversion.entries if entry.kind == "conflict"}


def one_replica(**sizes: int) -> dict[str, Any]:
    return {"parallelism": {"tp_size": 1, **sizes}}
