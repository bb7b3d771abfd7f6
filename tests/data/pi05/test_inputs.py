"""What PI0.5 is shown, and what its numbers mean to a robot."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hpcrl.config.sections.model import Pretrained
from hpcrl.data.pi05.inputs import (
    STATISTICS,
    Scale,
    prompt_counter,
    resized,
    row_decoder,
    statistics_of,
    written_prompt,
)
from hpcrl.errors import ConfigError, DataError
from hpcrl.types import Prompt
from tests.paths import CONFIGS

MODEL = Pretrained(str(CONFIGS / "reach_pi05" / "model"))


def test_text_is_written_as_openpi_writes_it() -> None:
    state = np.array([-1.0, -0.5, 0.0, 1.0, 3.0])
    assert written_prompt(" pick_up the\ncup ", state) == "Task: pick up the cup, State: 0 64 128 255 255;\nAction: "
    assert written_prompt("reach", None) == "reach\n"
    decode = row_decoder(MODEL)
    ids = [20, 7, 5, 21]
    assert decode(ids) == "Task: reach"
    assert decode([*ids, 270, 271]) == "Task: reach2 actions"
    assert prompt_counter(MODEL)(Prompt("0", [{"role": "user", "content": "reach"}], "robot")) == 1


def test_numbers_are_scaled_by_statistics_or_bounds(tmp_path: Path) -> None:
    bounds = Scale.between(np.array([-2.0, 0.0]), np.array([2.0, 1.0]), "action")
    np.testing.assert_allclose(bounds.to_network(np.array([0.0, 1.0])), [0.0, 1.0], atol=1e-5)
    np.testing.assert_allclose(bounds.to_robot(np.array([[-1.0, 0.0]])), [[-2.0, 0.5]], atol=1e-5)
    with pytest.raises(ConfigError, match="its state has no bounds"):
        Scale.between(np.array([-np.inf]), np.array([1.0]), "state")
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


def test_images_keep_their_shape_in_the_middle_of_black() -> None:
    image = np.full((4, 8, 3), 200, np.uint8)
    found = resized(image, 16)
    assert found.shape == (16, 16, 3)
    assert (found[4:12] == 200).all()
    assert not found[:4].any()
    assert not found[12:].any()
