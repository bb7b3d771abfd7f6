"""What layers keep for backward: gradients are the same bit for bit, and memory is what the settings say."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from hpcrl.config import TrainerConfig
from hpcrl.config.validate import build
from hpcrl.planning.memory import Width, activations, layer_activations, recomputed_activations
from hpcrl.trainer.models.layers.recompute import recompute
from hpcrl.trainer.models.packed.attention import PACKED, PackedSequences

LAYERS, TOKENS = 5, 96
WIDTH = Width(layers=LAYERS, hidden=64, heads=4, kv_heads=4, head=16, ffn=160, vocabulary=50)
LENGTHS = [48, 48]  # equal, so that there is no padding
WAYS: dict[str, tuple[dict[str, Any], bool]] = {
    "inputs": ({}, False),
    "reentrant": ({"gradient_checkpointing_use_reentrant": True}, False),
    "attention": ({"gradient_checkpointing_keep": "attention"}, False),
    "every-second": ({"gradient_checkpointing_every": 2}, False),
    "every-second-with-attention": (
        {"gradient_checkpointing_every": 2, "gradient_checkpointing_keep": "attention"},
        False,
    ),
    "offloaded": ({}, True),
    "offloaded-reentrant": ({"gradient_checkpointing_use_reentrant": True}, True),
}
COMPUTED = {"inputs": 5, "reentrant": 5, "every-second": 3, "offloaded": 5, "offloaded-reentrant": 5}


class Attention(TorchDispatchMode):
    """Counts how often attention is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[str]()

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func._schema.name] += 1
        return func(*args, **(kwargs or {}))

    @property
    def forward(self) -> int:
        return self.calls["aten::_scaled_dot_product_flash_attention_for_cpu"]


def made(name: str | None = None) -> PreTrainedModel:
    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=WIDTH.vocabulary,
        hidden_size=WIDTH.hidden,
        intermediate_size=WIDTH.ffn,
        num_hidden_layers=LAYERS,
        num_attention_heads=WIDTH.heads,
        num_key_value_heads=WIDTH.kv_heads,
        use_cache=False,
    )
    model = Qwen2ForCausalLM._from_config(config, attn_implementation=PACKED).train()
    if name is not None:
        settings, offload = WAYS[name]
        settings = build(TrainerConfig, {"policy": {"model": {"path": "m"}}, **settings}).recomputation
        assert settings is not None
        recompute(model, settings, offload=offload)
    return model


def forward(model: PreTrainedModel) -> torch.Tensor:
    bounds = torch.tensor([0, LENGTHS[0], TOKENS], dtype=torch.int32)
    ids = torch.arange(TOKENS)[None] % WIDTH.vocabulary
    places = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    packed = PackedSequences.of(LENGTHS, bounds)
    return model.base_model(input_ids=ids, position_ids=places, use_cache=False, packed=packed).last_hidden_state


@pytest.mark.parametrize("name", WAYS)
def test_gradients_are_the_same(name: str) -> None:
    found = list[list[torch.Tensor]]()
    for model in (made(), made(name)):
        with Attention() as counted:
            forward(model).square().sum().backward()
        found.append([each.grad for each in model.base_model.parameters() if each.grad is not None])
        again = COMPUTED.get(name, 0) if len(found) == 2 else 0
        assert counted.forward == LAYERS + again
    assert len(found[0]) == len(found[1]) > LAYERS
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def kept(model: PreTrainedModel, run: Callable[[PreTrainedModel], torch.Tensor] = forward) -> int:
    """Return the bytes that are there after a forward pass and were not before, weights apart."""
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        out = run(model)
        found = tracker.get_tracker_snapshot("current")[torch.device("cpu")]
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    assert out.requires_grad
    return found["Total"] - parameters


@pytest.mark.parametrize(("every", "attention"), [(1, False), (1, True), (2, False), (2, True)])
def test_memory_is_what_is_estimated(every: int, attention: bool) -> None:
    name = {(1, False): "inputs", (1, True): "attention", (2, False): "every-second"}.get((every, attention))
    measured = kept(made(name or "every-second-with-attention"))
    counted = recomputed_activations(WIDTH, TOKENS, 4, every=every, attention=attention)
    # what is estimated has one layer more, of which backward keeps all while it is computed again
    counted -= TOKENS * layer_activations(WIDTH, 4, fused=False)
    # beside the layers: what the last norm keeps and its result, and the angles of positions
    beside = TOKENS * 4 * (3 * WIDTH.hidden + 2 * WIDTH.head)
    assert measured - beside == pytest.approx(counted, rel=0.05)
    assert counted < activations(WIDTH, TOKENS, 4, fused=False, recompute=False, layers=LAYERS)


@pytest.mark.parametrize("name", ["inputs", "offloaded", "offloaded-reentrant"])
def test_inputs_of_layers_leave_the_device(name: str) -> None:
    """On a CPU what is offloaded is a copy in the same memory, and the input itself is free."""
    model, inputs = made(name), list[weakref.ref[torch.Tensor]]()
    for layer in model.base_model.layers[1:]:
        layer.register_forward_pre_hook(lambda _, given: inputs.append(weakref.ref(given[0].untyped_storage())))
    out = forward(model)
    alive = sum(each() is not None for each in inputs)
    assert len(inputs) == LAYERS - 1
    assert alive == (LAYERS - 1 if name == "inputs" else 0)
    assert out.requires_grad


def test_an_estimate_of_what_is_offloaded_has_one_layer_on_the_device() -> None:
    one = layer_activations(WIDTH, 2, fused=False)
    assert recomputed_activations(WIDTH, 10, 2, offloaded=True) == 10 * (64 * 2 + one)
    assert recomputed_activations(WIDTH, 10, 2) == 10 * (5 * 64 * 2 + one)
