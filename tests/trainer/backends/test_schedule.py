"""Learning rates by hand, and against transformers' schedulers of the same names."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import get_scheduler

from hpcrl.config import OptimizerConfig
from hpcrl.trainer.backends.fsdp.optimizer import LossScale
from hpcrl.trainer.backends.schedule import is_due, lr_factor


def factors(total: int = 10, **options: Any) -> list[float]:
    return [lr_factor(OptimizerConfig(**options), update, total) for update in range(total)]


@pytest.mark.parametrize("warmup", [0, 7])
@pytest.mark.parametrize(
    ("name", "theirs", "ours"),
    [
        ("constant_with_warmup", {}, {"scheduler": "constant_with_warmup"}),
        ("linear", {}, {"scheduler": "linear"}),
        ("cosine", {}, {"scheduler": "cosine"}),
        ("cosine_with_min_lr", {"min_lr": 2e-5}, {"scheduler": "cosine", "min_lr_factor": 0.2}),
        ("polynomial", {}, {"scheduler": "linear", "min_lr_factor": 1e-3}),
        (
            "polynomial", {"power": 2.5, "lr_end": 1e-5},
            {"scheduler": "linear", "decay_power": 2.5, "min_lr_factor": 0.1},
        ),
        ("inverse_sqrt", {}, {"scheduler": "inverse_sqrt"}),
        (
            "warmup_stable_decay", {"num_decay_steps": 30, "decay_type": "1-sqrt", "min_lr_ratio": 0.1},
            {"scheduler": "sqrt", "decay_ratio": 0.3, "min_lr_factor": 0.1, "warmup_start_factor": 0.1},
        ),
        ("cosine_with_restarts", {}, {"scheduler": "cosine"}),
        ("cosine_with_restarts", {"num_cycles": 3}, {"scheduler": "cosine", "decay_cycles": 3}),
    ],
)  # fmt: skip
def test_each_scheduler_of_transformers(name: str, theirs: dict[str, Any], ours: dict[str, Any], warmup: int) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1e-4)
    other = get_scheduler(name, optimizer, warmup, 100, scheduler_specific_kwargs=theirs)
    for update in range(101):
        config = OptimizerConfig(num_warmup_steps=warmup, warmup_shape="below_lr", **ours)
        assert lr_factor(config, update, 100) == pytest.approx(other.get_last_lr()[0] / 1e-4, rel=0, abs=1e-9), update
        optimizer.step()
        other.step()


def test_the_warm_up_starts_where_it_is_told() -> None:
    assert factors(warmup_ratio=0.3)[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert factors(warmup_ratio=0.3, warmup_start_factor=0.2)[:4] == pytest.approx([0.4, 0.6, 0.8, 1.0])


@pytest.mark.parametrize(
    ("scheduler", "shape"),
    [
        ("linear", lambda g: 1 - g),
        ("sqrt", lambda g: 1 - math.sqrt(g)),
        ("cosine", lambda g: (1 + math.cos(math.pi * g)) / 2),
    ],
)
def test_the_decay(scheduler: str, shape: Any) -> None:
    after_warmup = factors(scheduler=scheduler, num_warmup_steps=2)
    assert after_warmup[2:] == pytest.approx([shape(step / 8) for step in range(8)])
    late = factors(scheduler=scheduler, num_warmup_steps=2, decay_ratio=0.5, min_lr_factor=0.1)
    assert late[2:5] == [1.0] * 3
    assert late[5:] == pytest.approx([0.1 + 0.9 * shape(step / 5) for step in range(5)])


def test_a_decay_begins_after_the_warm_up_and_ends_with_the_run() -> None:
    options = {"scheduler": "linear", "num_warmup_steps": 8, "decay_ratio": 1.0, "min_lr_factor": 0.5}
    assert factors(**options)[7:] == pytest.approx([8 / 9, 1.0, 0.75])
    assert lr_factor(OptimizerConfig(**options), 30, 10) == 0.5
    assert factors(scheduler="linear", decay_ratio=0.0) == [1.0] * 10


@pytest.mark.parametrize(("interval", "steps"), [(0, []), (1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (5, [5]), (9, [5])])
def test_what_is_due_every_few_steps(interval: int, steps: list[int]) -> None:
    assert [step for step in range(1, 6) if is_due(interval, step, 5)] == steps


def test_a_warm_up_has_the_shape_that_is_set() -> None:
    assert factors(num_warmup_steps=4)[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factors(num_warmup_steps=4, warmup_shape="to_lr")[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert factors(num_warmup_steps=4, warmup_shape="from_start")[:5] == pytest.approx([0.0, 1 / 3, 2 / 3, 1.0, 1.0])
    later = factors(num_warmup_steps=3, warmup_shape="from_start", warmup_start_factor=0.5)
    assert later[:4] == pytest.approx([0.5, 0.75, 1.0, 1.0])
    assert factors(num_warmup_steps=1, warmup_shape="from_start")[0] == 1.0
    assert factors(num_warmup_steps=1000, warmup_shape="to_lr")[-1] == 1.0  # cut to the run


def test_the_scale_of_the_loss_follows_the_gradients() -> None:
    scale = LossScale.of("fp16")
    for _ in range(3):
        scale.follow(finite=False)
    assert scale.value == 2.0**13
    for _ in range(1999):
        scale.follow(finite=True)
    resumed = LossScale.of("fp16")
    resumed.restore(scale.state())
    assert resumed == scale
    resumed.follow(finite=True)
    assert (resumed.value, resumed.steps) == (2.0**14, 0)
    for _ in range(20):
        scale.follow(finite=False)
    assert scale.value == 1.0


def test_other_number_types_have_no_scale() -> None:
    scale = LossScale.of("bf16")
    scale.follow(finite=False)
    assert (scale.value, scale.state()) == (1.0, {})
