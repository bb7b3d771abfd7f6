"""The head runs where its results count, and what is trained is the same as if it ran everywhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from hpcrl.config.sections.algorithm import AlgorithmConfig
from hpcrl.config.validate import build
from hpcrl.trainer.backends.fsdp.model import PackedPolicy
from hpcrl.trainer.loss import build_objective
from hpcrl.trainer.models.forward import ForwardConfig
from hpcrl.trainer.models.packed.attention import PACKED
from hpcrl.trainer.packing import pack, untrained_micro_batch
from hpcrl.types import MicroBatch
from tests.trainer.material import make_sample, with_mask

WIDTH, VOCABULARY = 32, 96
MODEL = {
    "hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "vocab_size": VOCABULARY,
}  # fmt: skip
ALGORITHM = {
    "use_entropy_loss": True, "entropy_loss_coef": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.1, "positive_nll_coef": 0.1,
    "off_policy_correction": {"tis_ratio_type": "token"},
}  # fmt: skip


def policy(chunk_rows: int = 1000, **forward: Any) -> PackedPolicy:
    torch.manual_seed(1)
    config = AutoConfig.for_model("qwen3", **MODEL)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=PACKED, dtype=torch.float32)
    return PackedPolicy(model, ForwardConfig(temperature=0.9, chunk_rows=chunk_rows, **forward))


def micro_batch(*, masked: bool = False) -> MicroBatch:
    """Return three samples, most of each a prompt."""
    draw = torch.Generator().manual_seed(2)
    samples = [make_sample(draw, length, prompt) for length, prompt in ((20, 14), (31, 30), (9, 3))]
    packed = pack([with_mask(sample) for sample in samples] if masked else samples, version=0)
    packed.weights, packed.nll_weights = [0.1, 0.2, 0.3], [0.3, 0.0, 0.2]
    scores, size = packed.scores, len(packed.token_ids)
    scores.old_logprobs, scores.ref_logprobs, scores.advantages = (torch.randn(size, generator=draw) for _ in range(3))
    return packed.whole()


def everywhere(batch: MicroBatch) -> MicroBatch:
    return replace(batch, head_rows=torch.arange(len(batch.token_ids)))


def trained(model: PackedPolicy, batch: MicroBatch) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], int]:
    """Return metrics, gradients by name, and the operations of it all."""
    model.zero_grad()
    with FlopCounterMode(display=False) as counter:
        loss, sums = build_objective(build(AlgorithmConfig, ALGORITHM))(batch, *model.run(batch))
        loss.backward()
    gradients = {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    return sums, gradients, counter.get_total_flops()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("chunk_rows", [3, 1000])
def test_the_same_training_with_fewer_operations(chunk_rows: int, masked: bool) -> None:
    model, batch = policy(chunk_rows), micro_batch(masked=masked)
    sums, gradients, operations = trained(model, batch)
    expected_sums, expected, more = trained(model, everywhere(batch))
    torch.testing.assert_close(sums, expected_sums, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(gradients, expected, atol=1e-6, rtol=1e-6)
    tokens = int(batch.loss_mask.sum())
    left_out = len(batch.token_ids) - tokens
    assert batch.head_rows.tolist() == batch.loss_mask.nonzero()[:, 0].tolist()
    assert left_out > 2 * tokens
    # in slices, backward computes the logits a second time
    assert more - operations == (8 if chunk_rows == 3 else 6) * WIDTH * VOCABULARY * left_out


def test_scores_are_those_of_the_trained_tokens() -> None:
    model, batch = policy(), micro_batch()
    with torch.no_grad():
        (logprobs_P, _), (all_P, _) = model.run(batch), model.run(everywhere(batch))
    torch.testing.assert_close(logprobs_P, all_P * batch.loss_mask)


def test_a_micro_batch_without_a_trained_token_has_gradients_nevertheless() -> None:
    """Those of the head too: where ranks add up gradients, each has to send one."""
    model, batch = policy(), micro_batch()
    zeros = torch.zeros_like(batch.weights)
    nothing = MicroBatch(
        **{**vars(batch), "loss_mask": zeros, "weights": zeros, "nll_weights": zeros, "head_rows": None}
    )
    _, gradients, _ = trained(model, nothing)
    assert gradients.keys() == dict(model.named_parameters()).keys()
    assert not any(gradient.any() for gradient in gradients.values())


def test_all_tokens_of_a_probe() -> None:
    model, ids = policy(), [5, 3, 17, 90]
    with torch.no_grad():
        logprobs_P, _ = model.run(untrained_micro_batch(ids))
        logits = model.model(torch.tensor([ids]), packed=None).logits[0] / 0.9
    torch.testing.assert_close(logprobs_P[:-1], logits.log_softmax(-1)[range(3), ids[1:]])


@pytest.mark.parametrize("entropy_loss", [False, True])
def test_entropy_without_a_gradient_is_computed_once(entropy_loss: bool) -> None:
    """In slices backward computes all again, but an entropy that only a metric wants."""
    model, asked = policy(3, entropy_loss=entropy_loss), list[str]()
    rows = model._rows
    model._rows = lambda *given: (asked.append(given[5]), rows(*given))[1]
    batch = micro_batch()
    model.run(batch)[0].sum().backward()
    slices = -(-len(batch.head_rows) // 3)
    forward, backward = ("trained", "trained") if entropy_loss else ("metric", "none")
    assert asked == [forward] * slices + [backward] * slices
