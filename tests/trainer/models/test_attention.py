"""Packed attention against the model's own attention on one sample at a time."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch.nn.attention import flex_attention
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, PreTrainedModel

from hpcrl.errors import DataError
from hpcrl.trainer.models.packed import kernels
from hpcrl.trainer.models.packed.attention import PACKED, PADDED, PackedSequences, attend, packed_attention
from hpcrl.trainer.models.packed.kernels import AttentionKind, Places, flex, seen_blocks
from hpcrl.trainer.models.packed.tree import PrefixTree
from hpcrl.trainer.packing import shared_prefixes
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
        attend(heads, heads, heads, sequences, AttentionKind())
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


KINDS = {
    "window": {"window": 5},
    "softcap": {"softcap": 2.0, "scale": 0.7},
    "sinks": {"sinks": torch.tensor([1.0, -2.0, 0.5, 3.0], requires_grad=True)},
    "all": {"window": 7, "softcap": 1.5, "sinks": torch.tensor([0.0, 1.0, 2.0, -1.0], requires_grad=True)},
}
Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def gradients(output: torch.Tensor, heads: Heads, kind: AttentionKind) -> list[torch.Tensor]:
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    return list(
        torch.autograd.grad((output * weights).sum(), [*heads, *([kind.sinks] if kind.sinks is not None else [])])
    )


def drawn_heads(total: int) -> Heads:
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(total, heads, 8, generator=draw).requires_grad_() for heads in (4, 2, 2))
    return query, key, value


def with_all_scores(
    query_THD: torch.Tensor, key_THD: torch.Tensor, value_THD: torch.Tensor, kind: AttentionKind
) -> torch.Tensor:
    """Return the attention output of one sample as its formula is written."""
    size, scale = len(query_THD), kind.scale or query_THD.shape[-1] ** -0.5
    back = torch.arange(size)[:, None] - torch.arange(size)
    key_THD, value_THD = (heads.repeat_interleave(2, 1) for heads in (key_THD, value_THD))
    scores_HTT = scale * torch.einsum("qhd,khd->hqk", query_THD, key_THD)
    if kind.softcap is not None:
        scores_HTT = kind.softcap * torch.tanh(scores_HTT / kind.softcap)
    weights_HTT = scores_HTT.exp() * ((back >= 0) & (back < (kind.window or size)))
    more_H = 0.0 if kind.sinks is None else kind.sinks.exp()[:, None, None]
    return torch.einsum("hqk,khd->qhd", weights_HTT / (weights_HTT.sum(-1, keepdim=True) + more_H), value_THD)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.faults_slow] if name in ("softcap", "sinks") else []) for name in KINDS],
)
def test_windows_caps_and_sinks(name: str) -> None:
    """By samples, by padded rows, more than a block of queries long, with prefixes computed once, and as GPUs compute it."""
    kind = AttentionKind(**KINDS[name])
    for lengths in ([5, 9, 1, 12], [6, 6, 6], [600, 3]):
        heads, sequences = drawn_heads(sum(lengths)), packed(lengths)
        of_samples = zip(*(each.split(lengths) for each in heads), strict=True)
        expected = torch.cat([with_all_scores(*sample, kind) for sample in of_samples])
        output = attend(*heads, sequences, kind)
        torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(
            gradients(output, heads, kind), gradients(expected, heads, kind), atol=1e-4, rtol=1e-4
        )
        detached = (each.detach() for each in heads)  # FlexAttention has gradients on GPUs only
        found = flex(*detached, kind, sequences.seen(kind.window))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_flex_attention_can_be_compiled_with_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs, but for the kernels: torch refuses gradients on CPUs, where its own code for them works when it is traced."""
    compiled = torch.compile(flex_attention.flex_attention, dynamic=True, fullgraph=True, backend="aot_eager")
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    monkeypatch.setattr(kernels, "_flex", lambda _on_gpu: compiled)
    kind, lengths = AttentionKind(window=40, softcap=2.0), [5, 90, 1, 12]
    heads, sequences = drawn_heads(sum(lengths)), packed(lengths)
    expected = attend(*heads, sequences, kind)
    output = flex(*heads, kind, sequences.seen(kind.window))
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradients(output, heads, kind), gradients(expected, heads, kind), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", KINDS)
def test_windows_caps_and_sinks_of_common_prefixes(name: str) -> None:
    lengths, common, kind = [9, 12, 12, 3], [0, 8, 10, 0], AttentionKind(**KINDS[name])
    prefixes = shared_prefixes(lengths, common)
    assert prefixes is not None
    tree, heads = PrefixTree(lengths, packed(lengths).cu_seqlens, prefixes), drawn_heads(len(prefixes.kept))
    places = Places.of(tree.cu_seqlens, sum(lengths))
    seen = seen_blocks(places.part(prefixes.kept), places, kind.window)
    query, key, value = (each.detach() for each in heads)
    whole = tree.computed(attend(*(tree.spread(each) for each in heads), packed(lengths), kind))
    output = tree.attend(*heads, kind)
    torch.testing.assert_close(output, whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradients(output, heads, kind), gradients(whole, heads, kind), atol=1e-4, rtol=1e-4)
    found = flex(query, tree.spread(key), tree.spread(value), kind, seen)
    torch.testing.assert_close(found, whole, atol=1e-5, rtol=1e-5)


def test_attention_of_another_kind_is_refused() -> None:
    heads = torch.zeros(1, 2, 6, 4)
    with pytest.raises(DataError, match="Identity, has position_bias"):
        packed_attention(torch.nn.Identity(), heads, heads, heads, None, packed=packed([6]), position_bias=heads)
    with pytest.raises(DataError, match="no way to tell it which samples"):
        packed_attention(torch.nn.Identity(), heads, heads, heads, None)
