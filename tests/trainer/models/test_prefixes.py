"""What samples begin with alike is computed once, and loss and gradients are those of samples that are computed whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

from hpcrl.config.sections.algorithm import AlgorithmConfig
from hpcrl.config.validate import build
from hpcrl.errors import DataError
from hpcrl.trainer.backends.fsdp.model import PackedCritic, PackedModel, PackedPolicy, PackedRewardModel
from hpcrl.trainer.loss import build_objective
from hpcrl.trainer.models.attention import PACKED, PADDED, require_attention_only
from hpcrl.trainer.models.forward import ForwardConfig
from hpcrl.trainer.models.prefixes import common_prefixes, shared_prefixes
from hpcrl.trainer.models.tree import gathered
from hpcrl.trainer.packing import PackedSamples, pack
from hpcrl.types import MicroBatch, Sample

VOCABULARY = 32
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "vocab_size": VOCABULARY, "initializer_range": 0.2, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
FORWARD = ForwardConfig(temperature=0.9, chunk_rows=7)
ALGORITHM = build(
    AlgorithmConfig,
    {"use_kl_loss": True, "kl_loss_coef": 0.1, "use_entropy_loss": True, "entropy_loss_coef": 0.1, "positive_nll_coef": 0.1},
)  # fmt: skip

A, B, C, D, E = (list(range(start, start + 5)) for start in (1, 6, 11, 16, 21))
TREES = {
    "a group": [A + B, A + C, A + D + E, A + E],
    "two groups, and what they begin with": [[1, 2, *A], [1, 2, *B], [1, 2, 3, *C], [1, 2, 3, *D]],
    "turns of two responses": [A + B, A + B + C + D, A + B + C + D + E, A + E, A + E + B],
    "branches within branches": [A + B + C, A + B + D, A + B + D + E, A + C, A + C + D, B],
    "equal samples": [A + B, A + B, A + B],
    "a sample begins another one": [A + B + C, A + B, A, A + B + C],
    "nothing in common": [A, B, C],
    "one sample": [A],
    "samples of one token": [[1], [1], [1, 2], [2]],
}


def model_of(kind: str = "qwen3", attention: str = PACKED, **sizes: Any) -> PreTrainedModel:
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **{**SIZES, **sizes})
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)


def policy(**options: Any) -> PackedPolicy:
    return PackedPolicy(model_of(**options), FORWARD)


def packed(tree: list[list[int]], *, trained: int = 3) -> PackedSamples:
    """Return samples of which all but the first `trained` tokens are trained; one that has no more has an empty response."""
    draw = torch.Generator().manual_seed(2)
    samples = []
    for ids in tree:
        mask_T = (torch.arange(len(ids)) >= trained).float()
        logprobs_T = -3 * torch.rand(len(ids), generator=draw) * mask_T
        zeros_T = torch.zeros(len(ids))
        samples.append(Sample(torch.tensor(ids), mask_T, logprobs_T, zeros_T.int(), zeros_T, "stop"))
    found = pack(samples, version=0)
    found.weights = torch.rand(len(tree), generator=draw).tolist()
    found.nll_weights = torch.rand(len(tree), generator=draw).tolist()
    scores, size = found.scores, len(found.token_ids)
    scores.old_logprobs, scores.ref_logprobs, scores.advantages = (torch.randn(size, generator=draw) for _ in range(3))
    return found


def both(tree: list[list[int]]) -> tuple[MicroBatch, MicroBatch]:
    """Return a micro-batch of whole samples, and the same with prefixes computed once."""
    samples = packed(tree)
    whole = samples.whole()
    samples.share_prefixes()
    return whole, samples.whole()


def trained(model: PackedModel, batch: MicroBatch) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return what the objective tells, and gradients by name."""
    model.zero_grad()
    outputs = model.run(batch)
    if isinstance(model, PackedPolicy):
        loss, sums = build_objective(ALGORITHM)(batch, *outputs)
    else:
        draw = torch.Generator().manual_seed(3)
        loss = (outputs[0] * torch.randn(len(outputs[0]), generator=draw)).sum()
        sums = {"values": outputs[0].detach()}
    loss.backward()
    gradients = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    return {"loss": loss.detach(), **sums}, gradients


def expect_same(model: PackedModel, tree: list[list[int]]) -> bool:
    """Compare what both kinds of a micro-batch give; return whether there is a gradient at all."""
    whole, shared = both(tree)
    expected_sums, expected = trained(model, whole)
    sums, gradients = trained(model, shared)
    torch.testing.assert_close(sums, expected_sums, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradients, expected, atol=1e-5, rtol=1e-5)
    return any(bool(gradient.any()) for gradient in expected.values())


def test_tokens_are_laid_out_once() -> None:
    _, batch = both(TREES["turns of two responses"])
    prefixes = batch.prefixes
    assert prefixes is not None
    assert prefixes.lengths == [10, 10, 5, 5, 5]
    assert batch.token_ids[prefixes.kept].tolist() == A + B + C + D + E + E + B
    assert prefixes.cu_lengths.tolist() == [0, 10, 20, 25, 30, 35]
    assert both(TREES["nothing in common"])[1].prefixes is None
    assert both(TREES["one sample"])[1].prefixes is None


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), min_size=1, max_size=8))
def test_every_token_has_the_place_of_its_own_path(rows: list[list[int]]) -> None:
    ids, lengths = torch.tensor([one for row in rows for one in row]), list(map(len, rows))
    prefixes = shared_prefixes(lengths, common_prefixes(ids, lengths))
    if prefixes is None:
        return
    assert sum(prefixes.lengths) == len(prefixes.kept) == int(prefixes.cu_lengths[-1]) < len(ids)
    assert all(own >= 1 for own in prefixes.lengths)
    starts = [sum(lengths[:at]) for at in range(len(rows))]
    parents: dict[int, int] = {}
    for start, length in zip(starts, lengths, strict=True):
        path = prefixes.places[start : start + length].tolist()
        assert ids[prefixes.kept[path]].tolist() == ids[start : start + length].tolist()
        for before, token in zip([-1, *path], path, strict=False):
            assert parents.setdefault(token, before) == before, "a token stands behind the same tokens in all samples"
    firsts = prefixes.places[prefixes.kept]
    assert firsts.tolist() == list(range(len(prefixes.kept)))


@pytest.mark.parametrize("attention", [PACKED, PADDED])
@pytest.mark.parametrize("tree", TREES)
def test_loss_and_gradients_are_those_of_whole_samples(tree: str, attention: str) -> None:
    assert expect_same(policy(attention=attention), TREES[tree]) == (tree != "samples of one token")


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=10), min_size=1, max_size=6))
def test_loss_and_gradients_of_any_tree(rows: list[list[int]]) -> None:
    expect_same(policy(), rows)


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_are_recomputed(reentrant: bool) -> None:
    model = policy().train()
    expected = trained(model, both(TREES["a group"])[0])
    model.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    torch.testing.assert_close(trained(model, both(TREES["a group"])[1]), expected, atol=1e-5, rtol=1e-5)


def test_experts_choose_tokens_one_by_one() -> None:
    assert expect_same(policy(kind="qwen3_moe", **EXPERTS), TREES["branches within branches"])


def test_values_and_scores() -> None:
    tree = TREES["a sample begins another one"]
    body = AutoModel.from_config(
        AutoConfig.for_model("qwen3", **SIZES), attn_implementation=PACKED, dtype=torch.float32
    )
    body.add_module("head", nn.Linear(SIZES["hidden_size"], 1, bias=False))
    body.get_output_embeddings = lambda: body.head
    assert expect_same(PackedCritic(body, FORWARD), tree)
    assert expect_same(PackedRewardModel(body, FORWARD), tree)


def test_scores_without_gradients() -> None:
    model = policy()
    whole, shared = both(TREES["turns of two responses"])
    for options in ({}, {"top_k": 3}):
        with torch.no_grad():
            expected, found = (model.run(replace(batch, **options)) for batch in (whole, shared))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_fewer_operations() -> None:
    """Layers cost what the tokens cost that are left; the head has its trained tokens as before."""
    model, tree = policy(), [A * 10 + B, A * 10 + C, A * 10 + D]

    def operations(batch: MicroBatch) -> int:
        with FlopCounterMode(display=False) as counter:
            trained(model, batch)
        return counter.get_total_flops()

    whole, shared = map(operations, both(tree))
    assert shared < 0.55 * whole, (
        "65 of 165 tokens are left; the heads of 156 are not, nor is attention of them to the prompt"
    )


def test_gradients_of_many_samples_are_rounded_once() -> None:
    values_D = torch.zeros(2, 3, dtype=torch.bfloat16, requires_grad=True)
    gathered(values_D, torch.tensor([1] * 300 + [0])).sum().backward()
    assert values_D.grad is not None
    assert values_D.grad.tolist() == [[1.0] * 3, [300.0] * 3], "in bfloat16, 256 + 1 is 256"


def test_other_layers_are_refused() -> None:
    kinds = ["linear_attention", "full_attention"]
    config = AutoConfig.for_model(
        "qwen3_next", **SIZES, **EXPERTS, layer_types=kinds, linear_num_value_heads=2, linear_num_key_heads=2
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(DataError, match=r"Qwen3Next.* \(linear_attention, Conv1d\)"):
        require_attention_only(model)
    require_attention_only(model_of())
