"""Cosmos-RL's configuration: what it makes of the tables of a file, and what it refuses."""

from __future__ import annotations

from typing import Any

from hpcrl.config.convert.cosmos_resolve import resolve
from tests.golden.cases import Case


def from_dict(case: Case) -> dict[str, Any]:
    return dict(resolve(case.inputs["toml"]).values)


ADAPTERS = {"Config.from_dict*": from_dict}
