"""Routed experts of tokens as text, in vLLM's answers and in cached turns."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def experts_text(experts: NDArray[np.integer]) -> str:
    """Return an array as base64 of numpy's own format."""
    with io.BytesIO() as buffer:
        np.save(buffer, experts, allow_pickle=False)
        return base64.b64encode(buffer.getvalue()).decode()


def experts_of(text: str) -> NDArray[np.int16]:
    """Return the array of a text; vLLM's have no more than 16 bits. Raises ValueError where it is none."""
    return np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False).astype(np.int16)
