"""Model FLOPs against what torch counts while a model runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from hpcrl.config.sections.model import LoraConfig
from hpcrl.trainer.models.flops import ModelFlops, describe_flops, peak_tflops
from hpcrl.trainer.models.lora import add_adapters

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "vocab_size": 512,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def model_of(kind: str, **sizes: Any) -> Any:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **sizes), attn_implementation="eager")


@pytest.mark.parametrize("tied", [False, True])
def test_as_torch_counts(tied: bool) -> None:
    """It counts attention as if it were not causal."""
    model, length = model_of("qwen3", tie_word_embeddings=tied), 100
    flops = ModelFlops.of(model)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, length, dtype=torch.int64), use_cache=False).logits.sum().backward()
    assert flops.attention == 3 * 4 * 32
    whole = flops.training([length], length) + 6 * flops.attention * length**2
    assert whole == pytest.approx(counter.get_total_flops(), rel=0.01)  # it leaves norms out


def test_what_is_frozen_has_no_gradient() -> None:
    model, length = model_of("qwen3"), 100
    add_adapters(model, LoraConfig(rank=4), "trainer.policy", torch.float32, 0)
    model.enable_input_require_grads()  # else nothing goes back through the first layer's matrices
    flops = ModelFlops.of(model)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, length, dtype=torch.int64), use_cache=False).logits.sum().backward()
    whole = flops.training([length], length) + 6 * flops.attention * length**2
    assert whole == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_samples_add_up_and_attention_grows_with_the_square() -> None:
    flops = ModelFlops(parameters=10.0, head=7, attention=4)
    one_by_one = flops.training([3], 2) + flops.training([5], 1)
    assert flops.training([3, 5], 3) == one_by_one == 6 * 10 * 8 + 6 * 7 * 3 + 6 * 4 * (9 + 25)


def test_what_is_computed_once_counts_once() -> None:
    """Two tokens of the second sample are those of the first one; its last three attend to them nevertheless."""
    flops = ModelFlops(parameters=10.0, head=7, attention=4)
    assert flops.training([3, 5], 3, [3, 3]) == 6 * 10 * 6 + 6 * 7 * 3 + 6 * 4 * (9 + 25 - 4)


def test_experts_as_torch_counts() -> None:
    model, length = model_of("qwen3_moe", **EXPERTS), 100
    model.set_experts_implementation("eager")  # what torch's grouped products do, its counter does not know
    flops = ModelFlops.of(model)
    with FlopCounterMode(display=False) as counter:
        model(torch.randint(512, (1, length)), use_cache=False).logits.sum().backward()
    whole = flops.training([length], length) + 6 * flops.attention * length**2
    assert whole == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_what_is_computed_again_does_not_count() -> None:
    model, length = model_of("qwen3"), 100
    plain = ModelFlops.of(model).training([length], length)
    model.gradient_checkpointing_enable()
    model.train()
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, length, dtype=torch.int64), use_cache=False).logits.sum().backward()
    assert ModelFlops.of(model).training([length], length) == plain < 0.9 * counter.get_total_flops()


def test_a_token_goes_to_some_experts_only() -> None:
    """Two of eight experts of 3 x 64 x 32 numbers in each of three layers."""
    one, all_of_them = (model_of("qwen3_moe", **EXPERTS | {"num_experts_per_tok": top}) for top in (2, 8))
    missing = ModelFlops.of(all_of_them).parameters - ModelFlops.of(one).parameters
    assert missing == 3 * 6 * 3 * 64 * 32


def test_rates() -> None:
    rate, device = {"throughput/train_tflops_per_second_per_rank": 1.0}, torch.device("cpu")
    assert describe_flops(8e12, 2.0, 4, device) == rate
    assert describe_flops(8e12, 2.0, 4, device, peak=4.0) == rate | {"throughput/mfu": 0.25}
    assert [peak_tflops(name) for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "Tesla T4")] == [989, 756, None]
    assert [peak_tflops(name) for name in ("NVIDIA A100-SXM4-80GB", "NVIDIA GB200", "NVIDIA A40")] == [312, 2250, 149.7]
    assert peak_tflops("NVIDIA RTX A4000") is None, "no A40"


def test_a_model_of_no_attention_has_nothing_quadratic() -> None:
    assert ModelFlops(0.0, 100, 0).quadratic == 0.0  # as of pipelines, all of whose parameters count as a head
    assert ModelFlops(2.0, 100, 4).quadratic == 2.0
