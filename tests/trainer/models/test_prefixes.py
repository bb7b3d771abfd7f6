"""What samples begin with alike is computed once, and loss and gradients are those of samples that are computed whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from hpcrl.errors import DataError
from hpcrl.trainer.backends.fsdp.model import PackedCritic, PackedRewardModel
from hpcrl.trainer.models.packed.attention import PACKED, PADDED
from hpcrl.trainer.models.packed.states import keep_samples_apart
from hpcrl.trainer.models.packed.tree import gathered
from hpcrl.trainer.packing import common_prefixes, shared_prefixes
from hpcrl.types import MicroBatch
from tests.trainer.models.trees import EXPERTS, FORWARD, SIZES, TREES, A, B, C, D, E, both, expect_same, policy, trained


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
    """Of a kind that is not known, of one that does not take a kernel from outside, and of one that is told nothing about packed samples."""
    kinds = ["linear_attention", "full_attention"]
    for kind, sizes, problem in (
        (
            "minimax",
            {"layer_types": kinds, "num_local_experts": 2},
            r"MiniMax.* \(linear_attention\); set .*use_sample_packing",
        ),
        ("stablelm", {}, "StableLm.* takes no kernel from outside"),
    ):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **sizes))
        with pytest.raises(DataError, match=problem):
            keep_samples_apart(model)
