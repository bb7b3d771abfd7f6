"""Rewards that look at pictures."""

from __future__ import annotations

import numpy as np
import pytest

from hpcrl.config import EnvironmentConfig
from hpcrl.envs.rewards.response import Response
from hpcrl.envs.rewards.weighted import REWARDS
from hpcrl.errors import DataError


def worth(name: str, image: np.ndarray | None) -> float:
    return REWARDS[name](Response(text="", image=image), EnvironmentConfig())


def plain(red: int, green: int, blue: int) -> np.ndarray:
    return np.full((4, 6, 3), [red, green, blue], np.uint8)


def test_what_pictures_are_worth() -> None:
    assert [worth("redness", plain(*colour)) for colour in ((255, 0, 0), (9, 9, 9), (0, 255, 255))] == [1.0, 0.0, -1.0]
    assert [worth("brightness", plain(level, level, level)) for level in (0, 255)] == pytest.approx([0.0, 1.0])
    half = plain(0, 0, 0)
    half[:, :3] = 255
    assert (worth("symmetry", plain(1, 2, 3)), worth("symmetry", half)) == (1.0, 0.0)
    assert worth("redness", np.stack([plain(255, 0, 0), plain(0, 0, 0)])) == 0.5  # a video


@pytest.mark.parametrize("name", ["redness", "brightness", "symmetry"])
def test_a_text_is_no_picture(name: str) -> None:
    with pytest.raises(DataError, match="the reward is of pictures"):
        worth(name, None)
