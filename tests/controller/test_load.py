"""The controller under the load of many workers, over real HTTP (benchmarks/controller_http.py, smaller)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.controller_http import Load, measure


@pytest.mark.parametrize("groups", [1, 8])
def test_what_a_finished_group_costs(tmp_path: Path, groups: int) -> None:
    """Beside other work on the machine waiting tells little; the processor's time says how many groups per second there could be."""
    load = Load(rate=200.0, seconds=3.0, groups=groups, workers=20, batch_size=64)
    result = asyncio.run(measure(tmp_path / "project" / "run", load))
    assert result.refused == 0
    assert result.taken >= 0.5 * load.rate * load.seconds
    assert result.steps >= result.taken // load.batch_size - load.staleness - 1
    assert result.cpu / result.taken < 0.001, (
        "a thousand per second on a busy machine, more than two thousand on an idle one"
    )
