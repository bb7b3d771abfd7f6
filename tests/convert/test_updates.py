"""Optimizer steps per batch: as many after a conversion as before."""

from __future__ import annotations

from typing import Any

import pytest
import tomli_w

from hpcrl.config import TrainerConfig
from hpcrl.config.load import nested
from hpcrl.config.validate import build
from hpcrl.convert.cosmos.convert import convert_toml
from hpcrl.convert.skyrl.convert import convert_overrides

NAMES = ("train_batch_size", "policy_mini_batch_size", "update_epochs_per_batch")


def updates(values: dict[str, Any]) -> int:
    settings = {name: values[f"trainer.{name}"] for name in NAMES if f"trainer.{name}" in values}
    trainer = build(TrainerConfig, nested({**settings, "policy.model.path": "m"}))
    return trainer.updates_per_batch(trainer.policy_mini_batch_size)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("samples", "per_step", "passes", "expected"),
    [
        (64, None, 1, 1),
        (64, None, 3, 3),
        (64, 64, 1, 1),
        (64, 128, 2, 2),
        (64, 16, 1, 4),
        (64, 16, 3, 12),
        (64, 24, 2, 8),  # not 3, the last of them smaller: groups are cut into 4 equal parts, and that is said
    ],
)
def test_of_cosmos_rl(ranks: int, samples: int, per_step: int | None, passes: int, expected: int) -> None:
    """mu_iterations x ceil(samples of a rank / batch_size_per_optimize)."""
    policy: dict[str, Any] = {"type": "grpo", "dataset": {"name": "org/data"}, "mu_iterations": passes}
    policy |= {} if per_step is None else {"batch_size_per_optimize": per_step}
    tree = {
        "train": {"train_batch_per_replica": samples * ranks, "train_policy": policy},
        "rollout": {"n_generation": 4},
        "policy": {"parallelism": {"tp_size": 1, "dp_shard_size": ranks}},
    }
    conversion = convert_toml(tomli_w.dumps(tree), "source.toml")
    assert updates(conversion.values) == expected
    said = any("optimizer steps do not divide" in entry.message for entry in conversion.entries)
    assert said == (per_step == 24)


def test_of_skyrl() -> None:
    """update_epochs_per_batch x train_batch_size / policy_mini_batch_size."""
    words = {"train_batch_size": 64, "policy_mini_batch_size": 16, "update_epochs_per_batch": 2}
    conversion = convert_overrides([f"trainer.{name}={value}" for name, value in words.items()], "command")
    assert updates(conversion.values) == 8
