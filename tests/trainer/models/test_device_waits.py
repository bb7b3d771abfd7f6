"""A micro-batch never makes the host wait for a GPU: between its copy to the device and the end of its backward pass nothing is read back,
and nothing is copied there.

No GPU is needed: on the meta device, whatever would need a value on the host raises, and every copy is seen.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from hpcrl.algorithms.losses import POLICY_LOSSES
from hpcrl.config.sections.algorithm import AlgorithmConfig
from hpcrl.config.sections.dpo import PREFERENCE_LOSSES, UNPAIRED_LOSSES, DPOConfig
from hpcrl.config.validate import build
from hpcrl.trainer.backends.fsdp.model import PackedPolicy
from hpcrl.trainer.loss import build_objective
from hpcrl.trainer.models.forward import ForwardConfig
from hpcrl.trainer.models.packed.attention import PACKED
from hpcrl.trainer.offline.preferences import build_preference_objective
from hpcrl.trainer.packing import shared_prefixes
from hpcrl.types import MicroBatch

META = torch.device("meta")
LENGTHS = [5, 7]
MODEL = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "vocab_size": 64,
}  # fmt: skip
CORRECTIONS: list[dict[str, Any]] = [
    {},
    {"tis_ratio_type": "token", "token_mask_is_threshold_low": 0.5, "token_mask_is_threshold_high": 2.0},
    {"tis_ratio_type": "sequence", "sequence_mask_metric": "product", "outlier_token_is_threshold_low": 0.1},
    {"sequence_mask_metric": "geometric", "negative_sample_mask_delta": 0.1},
]


class Copies(TorchDispatchMode):
    """Lists what is copied to another device, and with `Made` what is made there of numbers on the host."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        devices = {value.device for value in (*args, result) if isinstance(value, torch.Tensor)}
        if "copy" in str(func) and len(devices) > 1:
            self.found.append(str(func))
        return result


class Made(TorchFunctionMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.tensor, torch.as_tensor, torch.from_numpy):
            self.found.append(func.__name__)
        return func(*args, **(kwargs or {}))


def policy() -> PackedPolicy:
    with META:
        config = AutoConfig.for_model("qwen3", **MODEL)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=PACKED, dtype=torch.bfloat16)
        return PackedPolicy(model, ForwardConfig(temperature=1.0, chunk_rows=4))


def micro_batch() -> MicroBatch:
    ids, values = torch.zeros(sum(LENGTHS), dtype=torch.int64), torch.tensor([0.0, 1.0] * (sum(LENGTHS) // 2))
    numbers = ("loss_mask", "weights", "nll_weights", "rollout_logprobs", "old_logprobs", "ref_logprobs", "advantages")
    columns: dict[str, Any] = dict.fromkeys(numbers, values)
    return MicroBatch(token_ids=ids, positions=ids, lengths=LENGTHS, labels=ids, **columns).to(META)


def test_such_waits_are_seen() -> None:
    with pytest.raises(RuntimeError, match="output_size"):
        torch.ones(2, device=META).repeat_interleave(torch.ones(2, dtype=torch.int64, device=META))
    with pytest.raises(RuntimeError, match="meta"):
        torch.ones(2, device=META).sum().item()
    found: list[str] = []
    with Copies(found), Made(found):
        torch.tensor(LENGTHS, device=META)
        torch.ones(2).to(META)
    assert len(found) == 2


@pytest.mark.parametrize(
    ("loss", "correction"),
    [
        pytest.param(
            loss,
            correction,
            marks=[pytest.mark.faults_slow] if at and number else [],  # each loss, and each correction with the first
            id=f"{loss}-{number}",
        )
        for at, loss in enumerate(POLICY_LOSSES)
        for number, correction in enumerate(CORRECTIONS)
    ],
)
def test_no_micro_batch_waits(loss: str, correction: dict[str, Any]) -> None:
    section = {
        "policy_loss_type": loss, "off_policy_correction": correction, "use_kl_loss": True, "use_entropy_loss": True,
        "positive_nll_coef": 0.1,
    }  # fmt: skip
    model, batch, objective = policy(), micro_batch(), build_objective(build(AlgorithmConfig, section))
    found: list[str] = []
    with Copies(found), Made(found):
        objective(batch, *model.run(batch))[0].backward()
    assert found == []


def test_no_micro_batch_of_shared_prefixes_waits() -> None:
    model, batch, objective = policy(), micro_batch(), build_objective(AlgorithmConfig(use_kl_loss=False))
    prefixes = shared_prefixes(LENGTHS, [0, 3])
    assert prefixes is not None
    batch = replace(batch, prefixes=prefixes.to(META))
    found: list[str] = []
    with Copies(found), Made(found):
        objective(batch, *model.run(batch))[0].backward()
    assert found == []


def test_placeholders_that_are_never_said_are_on_the_device_once() -> None:
    """They have a probability of 0 in each slice of the head's rows, of which there are three here."""
    model, batch = policy(), micro_batch()
    model.forward_config, model._never = replace(model.forward_config, never_said=(3, 5)), torch.tensor([3, 5])
    found: list[str] = []
    with Copies(found), Made(found):
        for _ in range(2):
            model.run(batch)[0].sum().backward()
    assert found == ["aten._to_copy.default"], "in the first pass"


def test_no_micro_batch_of_pairs_waits() -> None:
    losses = [name for name in PREFERENCE_LOSSES if name not in UNPAIRED_LOSSES]
    dpo = DPOConfig(loss_type=losses, label_smoothing=0.1)
    model, batch, objective = policy(), micro_batch(), build_preference_objective(dpo)
    found: list[str] = []
    with Copies(found), Made(found):
        objective(batch, *model.run(batch))[0].backward()
    assert found == []
