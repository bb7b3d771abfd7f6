"""Packed samples that begin alike in many ways, a tiny model, and what training it on them gives."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hpcrl.config.sections.algorithm import AlgorithmConfig
from hpcrl.config.validate import build
from hpcrl.trainer.backends.fsdp.model import PackedModel, PackedPolicy
from hpcrl.trainer.loss import build_objective
from hpcrl.trainer.models.forward import ForwardConfig
from hpcrl.trainer.models.packed.attention import PACKED
from hpcrl.trainer.packing import PackedRows, pack
from hpcrl.types import MicroBatch, Row

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


def packed(tree: list[list[int]], *, trained: int = 3) -> PackedRows:
    """Return samples of which all but the first `trained` tokens are trained; one that has no more has an empty response."""
    draw = torch.Generator().manual_seed(2)
    samples = []
    for ids in tree:
        mask_T = (torch.arange(len(ids)) >= trained).float()
        logprobs_T = -3 * torch.rand(len(ids), generator=draw) * mask_T
        zeros_T = torch.zeros(len(ids))
        samples.append(Row(torch.tensor(ids), mask_T, logprobs_T, zeros_T.int(), zeros_T, "stop"))
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
