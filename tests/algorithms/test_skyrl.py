"""The functions of hpcrl.algorithms give SkyRL's numbers where SkyRL has the same function.

`skyrl_cases.json` holds inputs and outputs of SkyRL 0b1980b2d.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch


CASES = json.loads((Path(__file__).parent / "skyrl_cases.json").read_text())["cases"]


def cases(function: str) -> list[Any]:
    found = [pytest.param(case, id=case["id"]) for case in CASES if case["fn"] == function]
    assert found, function
    return found


def close(actual: torch.Tensor, expected: Any) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected), atol=1e-6, rtol=1e-5)
