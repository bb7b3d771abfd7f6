"""What PI0.5's numbers mean to a robot."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hpcrl.config.sections.model import Pretrained
from hpcrl.errors import ConfigError, DataError
from hpcrl.families.pi05.statistics import PROCESSOR, STATISTICS, NormScale, statistics_files, statistics_of
from tests.data.pi05.material import write_lerobot


def test_numbers_are_scaled_by_statistics_or_bounds(tmp_path: Path) -> None:
    bounds = NormScale.between(np.array([-2.0, 0.0]), np.array([2.0, 1.0]), "action")
    np.testing.assert_allclose(bounds.to_network(np.array([0.0, 1.0])), [0.0, 1.0], atol=1e-5)
    np.testing.assert_allclose(bounds.to_robot(np.array([[-1.0, 0.0]])), [[-2.0, 0.5]], atol=1e-5)
    with pytest.raises(ConfigError, match="its state has no bounds"):
        NormScale.between(np.array([-np.inf]), np.array([1.0]), "state")
    assert statistics_of(Pretrained(str(tmp_path))) == {}
    quantiles = {"q01": [-1.0, 0.0, 0.0], "q99": [1.0, 4.0, 1.0]}
    (tmp_path / "assets" / "arm").mkdir(parents=True)
    file = tmp_path / "assets" / "arm" / STATISTICS
    file.write_text(json.dumps({"norm_stats": {"state": quantiles, "actions": quantiles}}))
    scale = statistics_of(Pretrained(str(tmp_path)))["actions"]
    np.testing.assert_allclose(scale.of_first(2, "actions").to_robot(np.array([0.0, 1.0])), [0.0, 4.0], atol=1e-5)
    with pytest.raises(DataError, match="3 numbers of its actions, and the simulator 4"):
        scale.of_first(4, "actions")
    (tmp_path / STATISTICS).write_text("{}")
    with pytest.raises(DataError, match="several"):
        statistics_of(Pretrained(str(tmp_path)))
    file.unlink()
    with pytest.raises(DataError, match="no quantiles"):
        statistics_of(Pretrained(str(tmp_path)))


def test_statistics_of_lerobot_are_read(tmp_path: Path) -> None:
    write_lerobot(tmp_path)
    model = Pretrained(str(tmp_path))
    scales = statistics_of(model)
    np.testing.assert_allclose(scales["state"].to_network(np.array([1.5])), [0.5], atol=1e-5)
    np.testing.assert_allclose(scales["actions"].to_robot(np.array([0.5])), [2.0], atol=1e-5)
    assert len(statistics_files(model)) == 2
    (tmp_path / STATISTICS).write_text("{}")
    assert statistics_files(model) == [tmp_path / STATISTICS]
    (tmp_path / STATISTICS).unlink()
    write_lerobot(tmp_path, stored=False)
    assert statistics_of(model) == {}
    (tmp_path / PROCESSOR).write_text("[]")
    with pytest.raises(DataError, match="expected a JSON object, found list"):
        statistics_of(model)


def test_statistics_of_lerobot_that_mean_something_else_are_refused(tmp_path: Path) -> None:
    model = Pretrained(str(tmp_path))
    write_lerobot(tmp_path, mode="MEAN_STD")
    with pytest.raises(DataError, match=r"by MEAN_STD: expected QUANTILES, .* put openpi's norm_stats\.json"):
        statistics_of(model)
    write_lerobot(tmp_path, relative=True)
    with pytest.raises(DataError, match=r"^trainer\.policy\.model\.path: .*relative to the robot's state"):
        statistics_of(model)
    write_lerobot(tmp_path)
    statistics_files(model)[1].write_bytes(b"nothing")
    with pytest.raises(DataError, match="no quantiles"):
        statistics_of(model)
