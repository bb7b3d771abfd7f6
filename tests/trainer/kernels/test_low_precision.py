"""FP8 by torchao, whose products a CPU rounds alike: which layers, close to fp32, and the same on two ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hpcrl.config.sections.model import LowPrecisionConfig
from hpcrl.trainer.distributed import World
from hpcrl.trainer.models.layers.low_precision import compute_in_fp8
from hpcrl.trainer.packing import untrained_micro_batch
from tests.trainer import scenarios
from tests.trainer.material import run_of_two
from tests.trainer.ranks import Ranks

pytestmark = pytest.mark.kernels


def way(**options: Any) -> dict[str, Any]:
    low = {"fp8": True, **options}
    return {"micro": 2, "forward": 4, "trainer": {"gradient_checkpointing": True, "policy": {"low_precision": low}}}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, model_path: Path, alone: World, two: Ranks) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("fp8")
    run = run_of_two(path / "run", 4, 3)
    options = {"model": str(model_path), "run": str(run.path), "out": str(path)}
    ways = {"plain": {"micro": 2, "forward": 4}, "rowwise": way(), "tensorwise": way(fp8_granularity="tensorwise")}
    scenarios.variants(alone, {**options, "variants": ways})
    two.play([("scenarios:variants", {**options, "variants": {"two": way()}})])
    return {name: json.loads((path / f"{name}.json").read_text()) for name in (*ways, "two")}


@pytest.mark.parametrize("name", ["rowwise", "tensorwise"])
def test_losses_are_close_to_those_of_fp32(found: dict[str, Any], name: str) -> None:
    """3 bits of a mantissa, in layers of 32 columns, of which large ones average more."""
    losses, plain = ([update["final_loss"] for update in found[each]] for each in (name, "plain"))
    assert losses == pytest.approx(plain, abs=0.1)
    assert losses[0] != pytest.approx(plain[0], abs=1e-6)


def test_policy_and_reference_round_alike(found: dict[str, Any]) -> None:
    assert found["rowwise"][0]["policy_kl"] == 0


def test_two_ranks_round_alike(found: dict[str, Any]) -> None:
    for one, other in zip(found["rowwise"], found["two"], strict=True):
        assert other["final_loss"] == pytest.approx(one["final_loss"], abs=0.05)


def test_layers_that_are_in_fp8() -> None:
    """Not the head, routers, experts that are one parameter, or layers that are not in multiples of 16."""
    from torchao.float8.float8_linear import Float8Linear

    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=16,
        mlp_only_layers=[1],
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    before = {name for name, _ in model.named_parameters()}
    compute_in_fp8(model, LowPrecisionConfig(fp8=True), torch.device("cpu"))
    layers = {name for name, module in model.named_modules() if isinstance(module, Float8Linear)}
    assert layers == {f"model.layers.1.mlp.{part}_proj" for part in ("gate", "up", "down")}
    assert {name for name, _ in model.named_parameters()} == before


@pytest.mark.parametrize("granularity", ["rowwise", "tensorwise"])
def test_products_are_close_and_any_number_of_tokens_is_right(granularity: str) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", vocab_size=16, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    plain, rounded = (AutoModelForCausalLM.from_config(config) for _ in range(2))
    rounded.load_state_dict(plain.state_dict())
    compute_in_fp8(rounded, LowPrecisionConfig(fp8=True, fp8_granularity=granularity), torch.device("cpu"))  # pyright: ignore[reportArgumentType]
    inputs_T = torch.randn(21, 64)  # no multiple of 16
    gradients = []
    for model in (plain, rounded):
        layer = model.model.layers[0].mlp.up_proj
        layer(inputs_T).square().sum().backward()
        gradients.append(layer.weight.grad)
    exact, found = gradients
    assert 0 < (found - exact).norm() / exact.norm() < 0.1


def test_engines_prove_their_weights_without_fp8(model_path: Path, alone: World) -> None:
    ids = [3, 5, 7, 2, 9, 11, 4]
    plain, rounded = (scenarios.make_engine(alone, str(model_path), each) for each in ({}, way()))
    assert rounded.probe(ids) == plain.probe(ids)
    batch = untrained_micro_batch(ids)
    assert next(rounded.logprobs([batch])).tolist() != next(plain.logprobs([batch])).tolist()
