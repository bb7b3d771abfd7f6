"""Tokens per second of a replica by the lengths of prompts and completions."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from hpcrl.config import Config
from hpcrl.rollout.engines.by_length import engine_speed_by_length
from hpcrl.rundir.layout import Run
from tests.paths import QUICKSTART


def test_each_pair_of_lengths_is_generated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tempfile.gettempdir()  # a process with an engine has its own
    monkeypatch.setenv("TMPDIR", place)
    monkeypatch.setattr("tempfile.tempdir", place)
    few = ["trainer.train_batch_size=3", "trainer.policy_mini_batch_size=3", "generator.n_samples_per_prompt=2"]
    config = Config.from_toml([QUICKSTART], few)
    assert config.max_model_len == 16 + 8
    found = engine_speed_by_length(config, Run(tmp_path), tmp_path / "engine.log")
    assert list(found) == [(1, 1), (1, 23), (23, 1)]
    assert all(speed > 0 for speed in found.values())


def test_a_replica_of_several_nodes_is_not_measured(tmp_path: Path) -> None:
    nodes = [
        "slurm.gpus_per_node=1",
        "generator.inference_engine.backend=vllm",
        "generator.inference_engine.tensor_parallel_size=2",
    ]
    assert engine_speed_by_length(Config.from_toml([QUICKSTART], nodes), Run(tmp_path), tmp_path / "engine.log") == {}
