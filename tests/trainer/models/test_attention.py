"""Packed attention against the model's own attention on one sample at a time."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, PreTrainedModel

from hpcrl.errors import DataError
from hpcrl.trainer.models.attention import PACKED, PADDED, PackedSequences, attend, packed_attention
from tests.trainer.material import VOCABULARY

CPU = torch.device("cpu")


def packed(lengths: list[int]) -> PackedSequences:
    return PackedSequences.of(lengths, torch.tensor([0, *accumulate(lengths)], dtype=torch.int32))


def packed_logits(model: PreTrainedModel, samples: list[torch.Tensor]) -> list[torch.Tensor]:
    lengths = [len(sample) for sample in samples]
    positions = torch.cat([torch.arange(length) for length in lengths])
    options = {"position_ids": positions[None], "use_cache": False, "packed": packed(lengths)}
    return list(model(input_ids=torch.cat(samples)[None], **options).logits[0].split(lengths))


def draw(lengths: list[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in lengths]


@pytest.mark.parametrize("attention", [PACKED, PADDED])
@pytest.mark.parametrize("lengths", [[5, 9, 1, 12], [6, 6, 6], [7], [150, 3, 1, 40]])
def test_packed_is_unpacked(model_path: Path, lengths: list[int], attention: str) -> None:
    packed, plain = (
        AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, attn_implementation=name)
        for name in (attention, "eager")
    )
    samples = draw(lengths)
    outputs = packed_logits(packed, samples)
    expected = [plain(input_ids=sample[None]).logits[0] for sample in samples]
    weights = [torch.randn(output.shape, generator=torch.Generator().manual_seed(1)) for output in expected]
    for output, other in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, other, atol=1e-5, rtol=1e-5)
    for results in (outputs, expected):
        torch.stack([(r * w).sum() for r, w in zip(results, weights, strict=True)]).sum().backward()
    for (name, one), other in zip(packed.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            one.grad, other.grad, atol=1e-4, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(("attention", "flash"), [(PACKED, True), (PADDED, False)])
def test_without_flash_attention_no_such_kernel_runs(model_path: Path, attention: str, flash: bool) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, attn_implementation=attention)
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU]) as profiled:
        packed_logits(model, draw([8, 10]))
    assert any("flash_attention" in event.key for event in profiled.key_averages()) == flash


@pytest.mark.parametrize(("lengths", "calls"), [([5, 9, 1, 12], 1), ([150, 150, 150], 1), ([150, 3, 1, 40], 4)])
def test_much_padding_is_not_computed(lengths: list[int], calls: int) -> None:
    heads, sequences = torch.zeros(sum(lengths), 4, 8), packed(lengths)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        attend(heads, heads, heads, sequences, None)
    counts = {event.key: event.count for event in profiled.key_averages()}
    assert counts["aten::scaled_dot_product_attention"] == calls


def test_samples_do_not_see_each_other(model_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, attn_implementation=PACKED)
    samples = draw([8, 10, 6])
    changed = [samples[0], (samples[1] + 1) % VOCABULARY, samples[2]]
    with torch.no_grad():
        before, after = packed_logits(model, samples), packed_logits(model, changed)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[2], after[2])
    assert not torch.allclose(before[1], after[1])


def test_a_token_does_not_see_what_follows(model_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, attn_implementation=PACKED)
    samples = draw([8, 10])
    changed = [samples[0].clone(), samples[1]]
    changed[0][5] = (changed[0][5] + 1) % VOCABULARY
    with torch.no_grad():
        before, after = packed_logits(model, samples), packed_logits(model, changed)
    assert torch.equal(before[0][:5], after[0][:5])
    assert not torch.allclose(before[0][5:], after[0][5:])


def test_attention_of_another_kind_is_refused() -> None:
    heads = torch.zeros(1, 2, 6, 4)
    sequences = packed([6])
    with pytest.raises(DataError, match="sliding window of 4 tokens for a sample of 6"):
        packed_attention(torch.nn.Identity(), heads, heads, heads, None, packed=sequences, sliding_window=4)
    with pytest.raises(DataError, match="softcap"):
        packed_attention(torch.nn.Identity(), heads, heads, heads, None, packed=sequences, softcap=30.0)
