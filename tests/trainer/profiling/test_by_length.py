"""Speed of optimizer steps by the length of the samples."""

from __future__ import annotations

import pytest

from hpcrl.config import Config
from hpcrl.trainer.distributed import World
from hpcrl.trainer.profiling.by_length import random_micro_batch, speed_by_length
from tests.paths import QUICKSTART


def test_each_length_is_trained(alone: World) -> None:
    config = Config.from_toml([QUICKSTART], ["trainer.peak_tflops=1e-3"])
    assert config.trainer.algorithm.use_kl_loss
    found = speed_by_length(config, alone)
    longest = 128 * 24  # samples of a micro-batch, and their tokens at most
    assert list(found) == [longest // 16, longest // 4, longest]
    assert all(speed > 0 and mfu > 0 for speed, mfu in found.values())
    answers = ["generator.max_turns=2", "trainer.algorithm.observation_nll_coef=0.1"]
    assert len(speed_by_length(Config.from_toml([QUICKSTART], answers), alone)) == 3
    megatron = Config.from_toml([QUICKSTART.with_name("quickstart_megatron.toml")])
    assert speed_by_length(megatron, alone) == {}


def test_a_micro_batch_trains_all_but_the_last_token_of_a_sample() -> None:
    batch = random_micro_batch([3, 2], 10, 0.5)
    assert batch.loss_mask.tolist() == [1, 1, 0, 1, 0]
    assert batch.weights.tolist() == pytest.approx([0.5, 0.5, 0, 0.5, 0])
    assert batch.positions.tolist() == [0, 1, 2, 0, 1]
