"""What a run does within a step, as `hpcrl status` and `hpcrl follow` show it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcrl.launch.manage.progress import progress_of
from hpcrl.rundir.layout import Run
from hpcrl.runtime.process_status import StatusWriter, read_process_statuses

WAITS = {"phase": "wait_for_generation_buffer"}


@pytest.mark.parametrize(
    ("trainer", "controller", "shown"),
    [
        ({"phase": "policy_train", "begun": 3, "expected": 8}, {}, "training, micro-batch 3/8"),
        ({"phase": "fwd_logprobs_values_reward", "begun": 5, "expected": 0}, {}, "computing log-probabilities, micro-batch 5"),
        ({"phase": "save_checkpoints"}, {}, "writing a checkpoint"),
        (WAITS, {"running": 60, "finished": 12, "batch_size": 64, "eval_open": 0}, "generating, 12/64 groups"),
        (WAITS, {"running": 60, "finished": 12, "batch_size": 64, "eval_open": 40, "waits_for_evaluation": False}, "generating, 12/64 groups"),
        (WAITS, {"running": 0, "finished": 0, "batch_size": 64, "eval_open": 40, "waits_for_evaluation": True}, "evaluating, 40 rows left"),
        (WAITS, {"running": 0, "finished": 0, "batch_size": 64, "unscored": 7}, "scoring, 7 groups left"),
        (WAITS, {}, ""),
        ({}, {}, ""),
    ],
)  # fmt: skip
def test_phases(tmp_path: Path, trainer: dict[str, Any], controller: dict[str, Any], shown: str) -> None:
    run = Run(tmp_path)
    run.endpoints.mkdir()
    StatusWriter(run, "trainer", 1).write("step 3/9", step=3, total=9, **trainer)
    StatusWriter(run, "controller", 1).write("serving", **controller)
    statuses = read_process_statuses(run, 1)
    assert str(progress_of(run, statuses, ended=False)).split(" · ")[:2] == ["step 3/9", shown or "ETA unknown"]
    assert progress_of(run, statuses, ended=True).within == ""
