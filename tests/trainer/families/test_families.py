"""docs/models.md says what hpcrl does with models of each family."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcrl.config.rules.model_fit import MEGATRON_FAMILIES, STATE_LAYERS
from tests.trainer.families.features import FEATURES, Feature, works
from tests.trainer.families.models import FAMILIES, Family
from tests.trainer.families.table import PAGE, promised, rows_of

MEGATRON_OR_VLLM = {"vLLM": "vllm", "Megatron": "megatron.core"}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute tiny models by one thread: more wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def cells() -> Iterator[Any]:
    for family, feature in product(FAMILIES, FEATURES):
        marks = [] if family.quick and feature.quick else [pytest.mark.faults_slow]
        yield pytest.param(family, feature, marks=marks, id=f"{family.kind}, {feature.name}")


@pytest.mark.parametrize(("family", "feature"), list(cells()))
def test_the_table_is_true(family: Family, feature: Feature, tmp_path: Path) -> None:
    if feature.name in MEGATRON_OR_VLLM:
        pytest.importorskip(MEGATRON_OR_VLLM[feature.name])
    assert works(family, feature, tmp_path) == promised(rows_of(PAGE.read_text())[family.kind], feature)


def test_the_table_has_all_families() -> None:
    rows = rows_of(PAGE.read_text())
    assert list(rows) == [family.kind for family in FAMILIES]
    assert rows.keys() >= STATE_LAYERS.keys() | MEGATRON_FAMILIES.keys()
    (column,) = [feature for feature in FEATURES if feature.name == "Megatron"]
    assert {kind for kind, line in rows.items() if promised(line, column)} == MEGATRON_FAMILIES.keys()
