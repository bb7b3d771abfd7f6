"""Rewards that look at pictures: small ones that anybody can check, in the place of models of taste."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcrl.config import EnvironmentConfig
from hpcrl.envs.rewards.response import Response
from hpcrl.errors import DataError

if TYPE_CHECKING:
    import numpy as np

_LARGEST = 255.0


def redness(response: Response, _environment: EnvironmentConfig) -> float:
    """Return how much redder a picture is than it is green and blue, from -1 to 1.

    Formula:
        mean of red less the mean of green and blue of a picture, -1 to 1
    Use:
        a diffusion policy is tried out
    Raises:
        DataError: there is no picture.
    """
    red, green, blue = _channels(response)
    return float(red - (green + blue) / 2)


def brightness(response: Response, _environment: EnvironmentConfig) -> float:
    """Return the mean luma of a picture, from 0 to 1.

    Formula:
        mean luma of a picture (ITU-R BT.601), 0 to 1
    Use:
        a diffusion policy is tried out
    Raises:
        DataError: there is no picture.
    """
    red, green, blue = _channels(response)
    return float(0.299 * red + 0.587 * green + 0.114 * blue)


def symmetry(response: Response, _environment: EnvironmentConfig) -> float:
    """Return how alike a picture and its mirror image are, left and right exchanged, from 0 to 1.

    Formula:
        1 less the mean difference of a picture and its mirror image, 0 to 1
    Use:
        a diffusion policy is tried out
    Raises:
        DataError: there is no picture.
    """
    pixels = _pixels(response)
    return 1.0 - float(abs(pixels - pixels[..., ::-1, :]).mean())


def _channels(response: Response) -> np.ndarray:
    return _pixels(response).reshape(-1, 3).mean(0)


def _pixels(response: Response) -> np.ndarray:
    """Return the picture or the video from 0 to 1, [..., height, width, 3]."""
    if response.image is None:
        raise DataError("the reward is of pictures, and the policy's response is a text")
    return response.image / _LARGEST
