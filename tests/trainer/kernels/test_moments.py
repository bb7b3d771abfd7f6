"""Adam with moments of fewer bits: close to Adam, in checkpoints as numbers, and as large as is estimated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from hpcrl.planning.memory import Weight, fsdp_state
from hpcrl.trainer.backends.fsdp.optimizer import numbers
from hpcrl.trainer.backends.reference import forget_moments
from hpcrl.trainer.distributed import World
from tests.trainer import scenarios
from tests.trainer.kernels.scenarios import bytes_held, stopped
from tests.trainer.material import run_of_two
from tests.trainer.ranks import Ranks

pytestmark = pytest.mark.kernels

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"moments": "bf16", "adam_betas": [0.9, 0.99]},
    "8bit": {"moments": "8bit"},
    "adam": {"name": "Adam"},
    "8bit-adam": {"moments": "8bit", "name": "Adam"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of its matrices some have more than 4096 elements on one rank, some on two, and some in neither case."""
    torch.manual_seed(7)
    config = Qwen2Config(
        vocab_size=18,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    path = tmp_path_factory.mktemp("model")
    Qwen2ForCausalLM(config).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(run_of_two(tmp_path_factory.mktemp("moments") / "run", 4, 3).path)


def way(name: str, **more: Any) -> dict[str, Any]:
    return {"micro": 4, "forward": 4, "trainer": {"policy": {"optimizer_config": WAYS[name]}}, **more}


def losses(path: Path) -> list[float]:
    return [update["final_loss"] for update in json.loads(path.read_text())]


def test_steps_are_close_to_those_of_adam(model: str, run: str, alone: World, tmp_path: Path) -> None:
    options = {"model": model, "run": run, "out": str(tmp_path), "variants": {name: way(name) for name in WAYS}}
    scenarios.variants(alone, options)
    found = {name: losses(tmp_path / f"{name}.json") for name in WAYS}
    for name, plain in {"bf16": "plain", "8bit": "plain", "8bit-adam": "adam"}.items():
        assert found[name][0] == found[plain][0]
        assert found[name][2:] != found[plain][2:], name
        assert found[name] == pytest.approx(found[plain], abs=5e-3), name


@pytest.mark.parametrize("name", ["bf16", "8bit"])
def test_a_run_goes_on_on_fewer_ranks(
    name: str, model: str, run: str, alone: World, two: Ranks, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()

    def options(out: str, **more: Any) -> dict[str, Any]:
        return way(name, model=model, run=run, saved=str(saved), out=str(tmp_path / out), **more)

    two.play(
        [
            ("kernels.scenarios:stopped", options("first")),
            ("kernels.scenarios:stopped", options("again", restores=True)),
        ]
    )
    stopped(alone, options("alone", restores=True))
    first, again, fewer = (losses(tmp_path / out) for out in ("first", "again", "alone"))
    assert again == pytest.approx(first, abs=1e-6)
    assert fewer == pytest.approx(first, abs=1e-3)


def test_a_checkpoint_says_what_moments_are(model: str, run: str, alone: World, tmp_path: Path) -> None:
    """Numbers become the same 8 bits again, whichever sign the largest of a block has; a run that chose none begins with them too, and the other way round."""
    engine = scenarios.make_engine(alone, model, way("8bit"))
    scenarios.train_steps(engine, scenarios.Run.open(run), range(1, 2), way("8bit"))
    engine.save(tmp_path, alone.control)
    other, plain = (scenarios.make_engine(alone, model, way(name)) for name in ("8bit", "plain"))
    for each in (other, plain):
        each.restore(tmp_path)
    quantized = 0
    for one, two, three in zip(*(each._optimizer.state.values() for each in (engine, other, plain)), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(numbers(one[key]), numbers(two[key]), rtol=1e-6, atol=0)
            assert torch.equal(numbers(one[key]), three[key])
            if hasattr(one[key], "codes"):
                assert torch.equal(one[key].codes, two[key].codes)
                quantized += 1
    assert quantized > 4
    forget_moments(engine._optimizer)
    assert all(not numbers(value).any() for state in engine._optimizer.state.values() for value in state.values())


@pytest.mark.parametrize("name", ["bf16", "8bit"])
def test_memory_is_what_is_estimated(name: str, model: str, alone: World) -> None:
    found = bytes_held(alone, {"model": model, **way(name)})
    shapes = [
        Weight(name, tuple(each.shape)) for name, each in Qwen2ForCausalLM.from_pretrained(model).named_parameters()
    ]
    need, plain = (fsdp_state(shapes, 1, "fp32", moments=kept) for kept in (name, None))
    assert found["optimizer"] == need.optimizer < plain.optimizer
