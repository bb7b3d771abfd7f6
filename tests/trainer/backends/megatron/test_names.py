"""Where Hugging Face tensors lie in megatron's parameters; test_weights.py moves real ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("megatron.core")

from hpcrl.trainer.backends.megatron.architecture import architecture_of
from hpcrl.trainer.backends.megatron.names import Block, LocalWeight, Slot, name_in_memory, slot_names, slots
from tests.trainer.backends.megatron.material import CONFIGS, config_of

LAYER = "decoder.layers.5."


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # of local layers
        ("input_layernorm.weight", "input_layernorm.weight"),
        ("pre_mlp_layernorm.weight", "pre_mlp_layernorm.weight"),
        ("self_attention.linear_qkv.bias", "self_attention.linear_qkv.bias"),
        ("mlp.linear_fc1.weight", "mlp.linear_fc1.weight"),
        ("mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.linear_fc1.weight"),
        ("mlp.experts.local_experts.1.linear_fc1.weight", "mlp.experts.7.linear_fc1.weight"),
        # of TransformerEngine's
        ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.weight"),
        ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
        ("mlp.experts.linear_fc1.weight0", "mlp.experts.6.linear_fc1.weight"),
        ("mlp.experts.linear_fc2.weight1", "mlp.experts.7.linear_fc2.weight"),
    ],
)
def test_both_naming_schemes_name_the_same_weights(name: str, expected: str):
    # the third layer of this stage is the sixth of the model; the rank has experts 6 and 7
    assert slot_names(f"decoder.layers.2.{name}", 5, range(6, 8)) == [LAYER + expected]


def test_a_parameter_of_all_experts_is_one_weight_for_each():
    for name, layer in (("weight1", "linear_fc1"), ("weight2", "linear_fc2")):
        expected = [f"{LAYER}mlp.experts.{expert}.{layer}.weight" for expert in (6, 7)]
        assert slot_names(f"decoder.layers.2.mlp.experts.{name}", 5, range(6, 8)) == expected


def test_names_outside_of_layers_stay():
    for name in ("embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight"):
        assert slot_names(name, 0, range(0)) == [name]


def test_all_experts_in_one_parameter_are_read_as_the_grouped_kernel_reads_them():
    experts, inputs, outputs = 3, 4, 6
    for name, shape in (
        ("linear_fc1.weight", (inputs, experts * outputs)),
        ("linear_fc2.weight", (experts * inputs, outputs)),
    ):
        parameter = nn.Parameter(torch.rand(shape))
        kernel = parameter.data.view(experts, inputs, outputs)
        for expert in range(experts):
            part = LocalWeight(f"{LAYER}mlp.experts.{expert}.{name}", parameter, experts, expert).within(parameter.data)
            assert torch.equal(part, kernel[expert].T)
            assert part.data_ptr() == kernel[expert].data_ptr()


def blocks(slot: Slot, rank: int, ranks: int) -> list[tuple[str, int, int]]:
    return [(block.name.split(".")[-2], block.start, block.stop) for block in slot.share(rank, ranks)]


def test_queries_lie_before_the_key_and_value_of_their_group():
    slot = slots(architecture_of(config_of("qwen2"), "tiny"))["decoder.layers.0.self_attention.linear_qkv.weight"]
    first = [("q_proj", 0, 16), ("k_proj", 0, 8), ("v_proj", 0, 8)]
    second = [("q_proj", 16, 32), ("k_proj", 8, 16), ("v_proj", 8, 16)]
    assert blocks(slot, 0, 1) == first + second
    assert (blocks(slot, 0, 2), blocks(slot, 1, 2)) == (first, second)
    # more ranks than groups: megatron cuts through them
    assert blocks(slot, 2, 4) == second[:1]
    assert blocks(slot, 3, 4) == second[1:]
    assert slot.shape(4) == (16, 32)


def test_each_rank_has_its_part_of_gate_and_up():
    table = slots(architecture_of(config_of("qwen2"), "tiny"))
    both = table["decoder.layers.0.mlp.linear_fc1.weight"]
    assert blocks(both, 1, 2) == [("gate_proj", 24, 48), ("up_proj", 24, 48)]
    down = table["decoder.layers.0.mlp.linear_fc2.weight"]
    assert (down.dim, blocks(down, 1, 2), down.shape(2)) == (1, [("down_proj", 24, 48)], (32, 24))


def test_the_last_rank_has_less_of_a_vocabulary_that_does_not_divide():
    slot = slots(architecture_of(config_of("qwen2"), "tiny"))["output_layer.weight"]
    assert slot.share(3, 4) == [Block("lm_head.weight", 99, 131)]
    assert slot.shape(4) == (33, 32)


def test_norms_are_whole_on_each_rank():
    slot = slots(architecture_of(config_of("qwen2"), "tiny"))["decoder.final_layernorm.weight"]
    assert slot.share(1, 2) == [Block("model.norm.weight", 0, 32)]
    assert slot.shape(2) == (32,)


@pytest.mark.parametrize("model", CONFIGS)
def test_the_table_names_each_tensor_once(model: str):
    names = [name for slot in slots(architecture_of(config_of(model), "tiny")).values() for name in slot.tensors]
    assert len(names) == len(set(names))
    assert ("lm_head.weight" in names) != config_of(model).tie_word_embeddings


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.0.mlp.experts.3.up_proj.weight", "model.layers.0.mlp.experts.gate_up_proj"),
        ("model.layers.0.mlp.experts.3.down_proj.weight", "model.layers.0.mlp.experts.down_proj"),
        ("model.layers.0.block_sparse_moe.experts.3.w3.weight", "model.layers.0.mlp.experts.gate_up_proj"),
        ("model.layers.0.block_sparse_moe.gate.weight", "model.layers.0.mlp.gate.weight"),
        ("model.layers.0.mlp.shared_expert.up_proj.weight", "model.layers.0.mlp.shared_expert.up_proj.weight"),
    ],
)
def test_names_in_memory_are_those_of_transformers(name: str, expected: str):
    assert name_in_memory(name) == expected
