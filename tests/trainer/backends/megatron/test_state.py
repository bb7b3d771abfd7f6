"""Checkpoints whose optimizer state was saved for the sizes that the run had (dist_ckpt_optim_fully_reshardable=false)."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core")

from tests.trainer.backends.megatron.material import write_model
from tests.trainer.launcher import run_ranks


def test_state_of_fixed_sizes_goes_on_with_those_alone(tmp_path: Path) -> None:
    write_model("qwen3", tmp_path / "model")
    given: dict[str, Any] = {"model": str(tmp_path / "model"), "directory": str(tmp_path / "saved")}
    halves = {"sizes": {"tensor_model_parallel_size": 2}}
    same, later, alone = (tmp_path / name for name in ("same", "later", "alone"))
    play(
        2,
        ("save", given | halves),
        ("restore", given | halves | {"reshardable": False, "out": str(same)}),
        ("restore", given | halves | {"reshardable": True, "out": str(later)}),
    )
    assert (same.read_text(), later.read_text()) == ("updates 3", "updates 3")
    play(1, ("restore", given | {"sizes": {}, "reshardable": False, "out": str(alone)}))
    assert "was saved with tensor_model_parallel_size 2, now 1" in alone.read_text()
    assert "Go on with those" in alone.read_text()


def test_all_ranks_hear_what_the_first_could_not_write(tmp_path: Path) -> None:
    write_model("qwen3", tmp_path / "model")
    out, saved = tmp_path / "told", tmp_path / "saved"
    play(2, ("blocked", {"model": str(tmp_path / "model"), "directory": str(saved), "out": str(out), "sizes": {}}))
    assert json.loads(out.read_text()) == [errno.EISDIR, errno.EISDIR]


def play(ranks: int, *todo: tuple[str, dict[str, Any]]) -> None:
    done = run_ranks(ranks, json.dumps(todo), script="trainer/backends/megatron/state_scenarios.py")
    assert done.returncode == 0, done.stderr
