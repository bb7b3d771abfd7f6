"""A reference that follows the policy: becomes it exactly, is saved once it has moved, and on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from hpcrl.config import TrainerConfig
from hpcrl.config.validate import build
from hpcrl.errors import DataError
from hpcrl.trainer.backends.reference import forget_moments
from hpcrl.trainer.distributed import World
from tests.trainer import scenarios
from tests.trainer.material import VOCABULARY, make_batch, make_run
from tests.trainer.ranks import Ranks

FOLLOWS = {"algorithm": {"use_kl_loss": True, "reference_reset_interval": 1}}


def section(**settings: Any) -> TrainerConfig:
    every_epoch = settings.pop("update_ref_every_epoch", False)
    table = {"policy": {"model": {"path": "m"}}, "algorithm": settings, "update_ref_every_epoch": every_epoch}
    return build(TrainerConfig, table)


def test_when_it_is_due() -> None:
    def due(trainer: TrainerConfig) -> list[int]:
        return [step for step in range(1, 13) if trainer.resets_reference(step, 5)]

    assert due(section()) == []
    assert due(section(reference_reset_interval=4)) == [4, 8, 12]
    assert due(section(update_ref_every_epoch=True)) == [5, 10]
    assert section(reference_reset_interval=4).algorithm.resets_optimizer
    assert not section(reference_reset_interval=4, reset_optimizer_with_reference=False).algorithm.resets_optimizer
    assert not section(update_ref_every_epoch=True).algorithm.resets_optimizer


def moving(model: Path, run: Path, out: Path, **options: Any) -> dict[str, Any]:
    trainer = {**FOLLOWS, **options.pop("trainer", {})}
    return {"model": str(model), "run": str(run), "out": str(out), "micro": 4, "trainer": trainer, **options}


LORA = {"policy": {"model": {"lora": {"rank": 4, "modules_to_save": ["norm"]}}, "optimizer_config": {"lr": 0.01}}}


@pytest.mark.parametrize("policy", [{}, LORA], ids=["all weights", "adapters"])
def test_it_becomes_the_policy_and_comes_back(
    model_path: Path, tmp_path: Path, alone: World, two: Ranks, policy: dict[str, Any]
) -> None:
    run = make_run(tmp_path / "run")
    make_batch(run, 1, groups=4, size=4)
    ref_by_two = {"ref": {"fsdp_config": {"fsdp_size": 1}}}
    todo = [
        moving(model_path, run.path, tmp_path / "saved", save=str(tmp_path / "kept"), trainer=policy),
        moving(model_path, run.path, tmp_path / "again", restore=str(tmp_path / "kept"), trainer=policy or ref_by_two),
    ]
    two.play([("scenarios:moving", options) for options in todo])
    scenarios.moving(
        alone, moving(model_path, run.path, tmp_path / "one", restore=str(tmp_path / "kept"), trainer=policy)
    )
    saved, again, one = (load_file(tmp_path / name) for name in ("saved", "again", "one"))
    assert not torch.allclose(saved["before"], saved["moved"])
    assert torch.equal(saved["policy"], saved["moved"])
    torch.testing.assert_close(again["before"], saved["moved"], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(one["before"], saved["moved"], atol=1e-6, rtol=1e-5)


def test_a_reset_optimizer_starts_as_a_new_one(model_path: Path, tmp_path: Path, alone: World) -> None:
    run = make_run(tmp_path / "run")
    make_batch(run, 1, groups=4, size=4)
    options = {"micro": 4, "trainer": FOLLOWS}
    engine = scenarios.make_engine(alone, str(model_path), options)
    scenarios.train_steps(engine, run, range(1, 2), options)
    engine.reset_reference(fresh_optimizer=False)
    states = list(engine._optimizer.state.values())
    assert all(state["step"] == 2 for state in states)
    engine.reset_reference(fresh_optimizer=True)
    assert all(value.abs().max() == 0 for state in states for value in state.values())
    assert engine.updates == 2, "the learning rate goes on"


def test_a_reference_of_another_shape_cannot_follow(model_path: Path, tmp_path: Path, alone: World) -> None:
    config = Qwen2Config.from_pretrained(model_path)
    config.intermediate_size = 40
    assert config.vocab_size == VOCABULARY
    Qwen2ForCausalLM(config).save_pretrained(tmp_path / "other")
    other = {"ref": {"model": {"path": str(tmp_path / "other")}}}
    with pytest.raises(DataError, match="other parameters than the policy"):
        scenarios.make_engine(alone, str(model_path), {"trainer": {**FOLLOWS, **other}})
    fixed = {"algorithm": {"use_kl_loss": True}}
    scenarios.make_engine(alone, str(model_path), {"trainer": {**fixed, **other}})


def test_what_an_optimizer_keeps_beside_its_moments_stays() -> None:
    """As Megatron-core's float32 weights with optimizer_cpu_offload; TransformerEngine counts steps in the groups."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones(3)
    optimizer.step()
    state = optimizer.state[weight]
    state["master_param"] = weight
    optimizer.param_groups[0]["step"] = 1
    forget_moments(optimizer)
    assert weight.detach().all()
    assert not any(state[name].any() for name in ("exp_avg", "exp_avg_sq", "step"))
    assert optimizer.param_groups[0]["step"] == 0
