"""Schedule-free AdamW: the paper's three sequences, the authors' package, one rank and two, checkpoints, what is evaluated and exported, memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from hpcrl.config.sections.model import OptimizerConfig, ParameterGroupConfig
from hpcrl.planning.memory import Weight, fsdp_state
from hpcrl.trainer.backends.fsdp.engine import FsdpPolicy
from hpcrl.trainer.backends.fsdp.optimizer import make_optimizer, make_step
from hpcrl.trainer.backends.fsdp.schedule_free import ScheduleFreeAdamW
from hpcrl.trainer.distributed import World
from tests.planning.memory_scenarios import held_by
from tests.trainer.kernels.scenarios import stopped
from tests.trainer.material import run_of_two
from tests.trainer.ranks import Ranks
from tests.trainer.scenarios import laid_over, make_engine, train_steps

NAME = "ScheduleFreeAdamW"
FREE: dict[str, Any] = {
    "trainer": {"policy": {"optimizer_config": {"name": NAME, "scheduler": "constant_with_warmup"}}},
    "micro": 4,
}
RATES = [0.1 / 3, 0.2 / 3, 0.1, 0.1, 0.1]
"""Of a warm-up of three steps."""


def averages(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    assert isinstance(optimizer, ScheduleFreeAdamW)
    return [optimizer.average(each) for group in optimizer.param_groups for each in group["params"]]


def test_steps_are_those_of_the_papers_sequences() -> None:
    """Each of x, y and z by itself, of two groups, in float64."""
    torch.manual_seed(1)
    layer = nn.Linear(6, 4).double()
    beta, second, eps, decay = 0.8, 0.95, 1e-3, {"weight": 0.1, "bias": 0.0}
    factor = {"weight": 1.0, "bias": 0.5}
    groups = {"biases": ParameterGroupConfig(match="bias", lr_factor=0.5, weight_decay=0.0)}
    config = OptimizerConfig(name=NAME, adam_betas=[beta, second], eps=eps, weight_decay=0.1, groups=groups)
    own = make_optimizer(layer, config)
    assert isinstance(own, ScheduleFreeAdamW)
    x, z, v = ({name: each.detach().clone() for name, each in layer.named_parameters()} for _ in range(3))
    v = {name: torch.zeros_like(each) for name, each in v.items()}
    for step, rate in enumerate(RATES, 1):
        y = {name: (1 - beta) * z[name] + beta * x[name] for name in x}
        for name, each in layer.named_parameters():
            torch.testing.assert_close(each.detach(), y[name], rtol=0, atol=1e-12, msg=f"{name}, step {step}")
        inputs, wanted = torch.randn(16, 6).double(), torch.randn(16, 4).double()
        (layer(inputs) - wanted).square().mean().backward()
        for name, each in layer.named_parameters():
            gradient, lr = each.grad, rate * factor[name]
            assert gradient is not None
            v[name] = second * v[name] + (1 - second) * gradient**2
            scale = (v[name] / (1 - second**step)).sqrt() + eps
            z[name] = z[name] - lr * (gradient / scale + decay[name] * y[name])
            share = rate**2 / sum(one**2 for one in RATES[:step])
            x[name] = (1 - share) * x[name] + share * z[name]
        make_step(own, rate)
        own.zero_grad()
    for name, each in layer.named_parameters():
        torch.testing.assert_close(own.average(each), x[name], rtol=0, atol=1e-12, msg=name)


def test_golden_values_of_the_authors_package() -> None:
    """AdamWScheduleFree of schedulefree 1.4.1 with lr 0.1, betas 0.9 and 0.99, weight_decay 0.1 and warmup_steps 3, in float64."""
    module = nn.Module()
    module.weight = nn.Parameter(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64))
    own = make_optimizer(module, OptimizerConfig(name=NAME, adam_betas=[0.9, 0.99], weight_decay=0.1))
    goal, curvature = torch.tensor([[0.2, -0.1, 3.0], [1.0, 3.0, 0.2]], dtype=torch.float64)
    for rate in RATES:
        own.zero_grad()
        ((module.weight - goal).square() * curvature).sum().backward()
        make_step(own, rate)
    assert module.weight.tolist() == pytest.approx([0.7170668686388276, -1.6770061535508904, 0.7576559959996638])
    (average,) = averages(own)
    assert average.tolist() == pytest.approx([0.7294552116684057, -1.691834343718513, 0.7457380820855748])


def test_a_parameter_that_is_to_stay_stays() -> None:
    layer = nn.Linear(3, 2)
    fixed = layer.bias.detach().clone()
    groups = {"fixed": ParameterGroupConfig(match="bias", lr_factor=0.0)}
    own = make_optimizer(layer, OptimizerConfig(name=NAME, groups=groups))
    for _ in range(2):
        layer(torch.ones(1, 3)).sum().backward()
        make_step(own, 0.1)
    assert torch.equal(layer.bias, fixed)
    assert all(torch.isfinite(each).all() for each in averages(own))


def weights(engine: FsdpPolicy) -> dict[str, torch.Tensor]:
    owners = [0] * len(engine.export_pieces(torch.float32))
    return {
        name: each.clone() for piece in engine.export_weights(torch.float32, owners) for name, each in piece.items()
    }


def test_averages_are_evaluated_and_exported_also_from_a_checkpoint(
    model_path: Path, alone: World, tmp_path: Path
) -> None:
    """Training goes on bit by bit as if nothing had been evaluated."""
    run = run_of_two(tmp_path / "run", 4, 3)
    engine, other, exported = (make_engine(alone, str(model_path), FREE) for _ in range(3))
    for each in (engine, other):
        train_steps(each, run, range(1, 2), FREE)
    trained = weights(engine)
    with engine.evaluated():
        found, probe = weights(engine), engine.probe([1, 2, 3, 4])
    for name, each in engine._model.model.named_parameters():
        optimizer = engine._optimizer
        assert isinstance(optimizer, ScheduleFreeAdamW)
        assert torch.equal(found[name], optimizer.average(each)), name
    assert any((found[name] - trained[name]).abs().max() > 1e-5 for name in found)
    assert probe != engine.probe([1, 2, 3, 4])
    assert all(torch.equal(trained[name], each) for name, each in weights(engine).items())
    engine.save(tmp_path, alone.control)
    exported.restore_weights(tmp_path)
    with exported.evaluated():
        assert all(torch.equal(found[name], each) for name, each in weights(exported).items())
    assert train_steps(engine, run, range(2, 3), FREE) == train_steps(other, run, range(2, 3), FREE)
    resumed = make_engine(alone, str(model_path), FREE)
    resumed.restore(tmp_path)
    train_steps(resumed, run, range(2, 3), FREE)
    assert all(torch.equal(weights(engine)[name], each) for name, each in weights(resumed).items())


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
def test_a_reference_becomes_the_average_from_which_a_fresh_optimizer_begins(
    model_path: Path, alone: World, tmp_path: Path, lora: bool
) -> None:
    adapters = {"policy": {"model": {"lora": {"rank": 2}}}} if lora else {}
    options = {
        **FREE,
        "trainer": laid_over(FREE["trainer"], {"algorithm": {"reference_reset_interval": 1}, **adapters}),
    }
    run = run_of_two(tmp_path / "run", 4, 3)
    engine = make_engine(alone, str(model_path), options)
    train_steps(engine, run, range(1, 2), options)
    optimizer = engine._optimizer
    assert isinstance(optimizer, ScheduleFreeAdamW)
    with engine.evaluated():
        found = weights(engine)
    engine.save(tmp_path, alone.control)
    exported = make_engine(alone, str(model_path), options)
    exported.restore_weights(tmp_path)
    with exported.evaluated():
        assert all(torch.equal(each, found[name]) for name, each in weights(exported).items())
    engine.reset_reference(fresh_optimizer=False)
    assert not all(torch.equal(each, found[name]) for name, each in weights(engine).items()), "y goes on"
    engine.reset_reference(fresh_optimizer=True)
    assert all(torch.equal(each, found[name]) for name, each in weights(engine).items())
    kept = [state[name] for state in optimizer.state.values() for name in ("step", "weight_sum", "exp_avg_sq")]
    assert not any(each.any() for each in kept)
    with engine.evaluated():
        assert all(torch.equal(each, found[name]) for name, each in weights(engine).items())
    (first, *_) = train_steps(engine, run, range(2, 3), options)
    assert first.sums["policy_kl"] == pytest.approx(0, abs=1e-6), "the policy begins as the reference"


@pytest.mark.faults_slow
def test_a_run_goes_on_on_fewer_ranks(model_path: Path, alone: World, two: Ranks, tmp_path: Path) -> None:
    run = str(run_of_two(tmp_path / "run", 4, 3).path)
    (tmp_path / "saved").mkdir()

    def options(out: str, **more: Any) -> dict[str, Any]:
        places = {"model": str(model_path), "run": run, "saved": str(tmp_path / "saved"), "out": str(tmp_path / out)}
        return {**FREE, **places, **more}

    again = ("kernels.scenarios:stopped", options("again", restores=True))
    two.play([("kernels.scenarios:stopped", options("first")), again])
    stopped(alone, options("alone", restores=True))
    whole = make_engine(alone, str(model_path), FREE)
    losses = [
        one.sums["final_loss"] for one in train_steps(whole, run_of_two(tmp_path / "own", 4, 3), range(1, 3), FREE)
    ]
    first, again, fewer = (json.loads((tmp_path / out).read_text()) for out in ("first", "again", "alone"))
    for other, near in ((again, 1e-6), (fewer, 1e-4)):
        assert [one["final_loss"] for one in other] == pytest.approx([one["final_loss"] for one in first], abs=near)
    assert [one["final_loss"] for one in first] == pytest.approx(losses[-len(first) :], abs=1e-4)


def test_memory_is_what_is_estimated(model_path: Path, alone: World) -> None:
    found = held_by(make_engine(alone, str(model_path), FREE))
    model = AutoModelForCausalLM.from_pretrained(model_path)
    shapes = [Weight(name, tuple(each.shape)) for name, each in model.named_parameters()]
    assert found["optimizer"] == fsdp_state(shapes, 1, "fp32", schedule_free=True).optimizer
