"""Rules about how models are kept, scheduled, adapted and profiled: each refuses what cannot work, and not what is next to it."""

from __future__ import annotations

from typing import Any

import pytest

from hpcrl.config import Config
from hpcrl.config.load import nested
from hpcrl.config.rules import check, impossible
from hpcrl.config.validate import build

BASE = {"data.train_data": ["t"], "data.val_data": ["v"], "trainer.policy.model.path": "m"}
FSDP, REF, OPTIMIZER = "trainer.policy.fsdp_config", "trainer.ref.fsdp_config", "trainer.policy.optimizer_config"


CASES: list[tuple[dict[str, Any], str, str, dict[str, Any]]] = [
    (
        {f"{REF}.mixed_precision.master_dtype": "bf16"}, f"{REF}.mixed_precision.master_dtype", "kept in param_dtype",
        {f"{FSDP}.mixed_precision.master_dtype": "bf16"},
    ),
    (
        {f"{REF}.mixed_precision.reduce_dtype": "bf16"}, f"{REF}.mixed_precision.reduce_dtype", "is not trained",
        {f"{REF}.mixed_precision.param_dtype": "fp16"},
    ),
    (
        {f"{OPTIMIZER}.min_lr_factor": 0.1}, f"{OPTIMIZER}.min_lr_factor", "which never falls",
        {f"{OPTIMIZER}.min_lr_factor": 0.1, f"{OPTIMIZER}.scheduler": "sqrt"},
    ),
    (
        {f"{OPTIMIZER}.decay_ratio": 0.1}, f"{OPTIMIZER}.decay_ratio", "which never falls",
        {f"{OPTIMIZER}.decay_ratio": 0.0},
    ),
    (
        {f"{OPTIMIZER}.warmup_start_factor": 0.1}, f"{OPTIMIZER}.warmup_start_factor", "without a warm-up",
        {f"{OPTIMIZER}.warmup_start_factor": 0.1, f"{OPTIMIZER}.warmup_ratio": 0.1},
    ),
    (
        {"trainer.gradient_checkpointing_use_reentrant": True, "trainer.gradient_checkpointing": False},
        "trainer.gradient_checkpointing_use_reentrant", "no effect", {"trainer.gradient_checkpointing_use_reentrant": True},
    ),
    (
        {"trainer.rope_scaling": {"factor": 2.0}}, "trainer.rope_scaling", "an entry rope_type",
        {"trainer.rope_scaling": {"factor": 2.0, "rope_type": "linear"}},
    ),
    (
        {"generator.rope_scaling": {"factor": 2.0}}, "generator.rope_scaling", "an entry rope_type",
        {"generator.rope_scaling": {"factor": 2.0, "type": "linear"}},
    ),
    (
        {"trainer.policy.freeze_pattern": ["(a"]}, "trainer.policy.freeze_pattern", '"(a" is not a regular expression',
        {"trainer.policy.freeze_pattern": ["(a)"]},
    ),
    (
        {"trainer.profiler.enable": True, "trainer.profiler.ranks": [0, 1]}, "trainer.profiler.ranks", "from 0 to 0",
        {"trainer.profiler.enable": True},
    ),
    (
        {"trainer.profiler.enable": True, "trainer.profiler.ranks": []}, "trainer.profiler.ranks", "found []",
        {"trainer.profiler.enable": False, "trainer.profiler.ranks": []},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "path", "words", "right"), CASES, ids=[case[1] for case in CASES])
def test_each_rule(wrong: dict[str, Any], path: str, words: str, right: dict[str, Any]) -> None:
    problems = impossible(build(Config, nested({**BASE, **wrong})))
    assert [problem.path for problem in problems] == [path]
    assert words in problems[0].message
    assert check(build(Config, nested({**BASE, **right}))) == []
