"""The trainer's side of turns: rank 0 may say that engines have the devices when all ranks have left theirs."""

from __future__ import annotations

import json
from pathlib import Path

from tests.trainer.ranks import Ranks


def test_a_turn_ends_when_all_ranks_have_left_their_devices(tmp_path: Path, two: Ranks) -> None:
    two.play([("scenarios:turning", {"out": str(tmp_path / "facts.json")})])
    facts = json.loads((tmp_path / "facts.json").read_text())
    calls, phases = ["to_host", "to_device"], ["offload", "onload"]
    lent = [[], calls, True, False, True]
    assert facts == {"left": True, "calls": calls, "apart": None, "phases": phases, "lent": lent}
