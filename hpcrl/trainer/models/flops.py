"""Floating-point operations of a training step, and their share of the device's peak (MFU).

The count is of the model, not of the implementation: a multiplication and an addition are two operations. Backward is twice forward, or as
much as forward for a frozen parameter. Recomputation does not count (A. Chowdhery et al., arXiv:2204.02311, appendix B). Causal attention
counts half (T. Dao, arXiv:2307.08691, section 4.1).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from hpcrl.config.rules.model_fit import experts_of

_PEAK_TFLOPS = {  # dense bf16, from the makers' data sheets; more particular names first
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "GH200": 989.0,
    "H100": 989.0,
    "H200": 989.0,
    "H800": 989.0,
    "B200": 2250.0,
    "GB200": 2250.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "A40": 149.7,
    "A6000": 154.8,
}


_ATTENTION = {"full_attention", "sliding_attention", "attention", "hybrid"}
_STATES_ONLY = {"mamba", "mamba2", "falcon_mamba"}


@dataclass(frozen=True)
class ModelFlops:
    """Operations of training a model.

    Attributes:
        parameters: that each token is multiplied with: without embedding and head, and of experts those that a token goes to.
        head: parameters that each trained token is multiplied with beside those.
        attention: layers x heads x numbers per head, of layers in which a token sees all before it.
        windowed: the same of layers in which it sees `window` tokens.
        frozen: of `parameters`, those that are not trained, as below adapters.
        frozen_head: whether `head` is not trained.
    """

    parameters: float
    head: int
    attention: int
    frozen: float = 0.0
    frozen_head: bool = False
    windowed: int = 0
    window: int = 0

    @property
    def quadratic(self) -> float:
        """What attention adds to a sample of T tokens is quadratic T^2 times what a token costs without it; windows and the head left out."""
        return 6.0 * self.attention / self._of_token if self.attention else 0.0

    @property
    def _of_token(self) -> float:
        return 6.0 * self.parameters - 2.0 * self.frozen

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelFlops:
        """Return that of a causal language model, which may be on the meta device; what requires no gradient is not trained."""
        text = model.config.get_text_config()
        experts = experts_of(text.to_dict())
        share = text.num_experts_per_tok / experts if experts else 1.0
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        assert embedding is not None
        assert head is not None
        counts = [
            ((share if ".experts." in name else 1.0) * weight.numel(), weight.requires_grad)
            for name, weight in model.named_parameters()
            if weight is not embedding.weight and weight is not head.weight
        ]
        whole, windowed = _attention_layers(text)
        heads = getattr(text, "num_attention_heads", None) or 0
        of_layer = heads * (getattr(text, "head_dim", None) or text.hidden_size // max(1, heads))
        return cls(
            sum(count for count, _ in counts),
            head.weight.numel(),
            whole * of_layer,
            sum(count for count, trained in counts if not trained),
            not head.weight.requires_grad,
            windowed * of_layer,
            getattr(text, "sliding_window", None) or 0,
        )

    def _scores(self, length: int) -> float:
        seen = min(length, self.window)
        return 6.0 * (self.attention * length**2 + self.windowed * seen * (2 * length - seen))

    def training(self, lengths: Sequence[int], trained: int, computed: Sequence[int] | None = None) -> float:
        """Return the operations of a forward and backward pass over samples of so many tokens.

        Args:
            trained: tokens of them all that are trained.
            computed: of each sample, its last tokens, where the others are also those of another sample and computed there; None: all.
        """
        body = sum(
            self._of_token * count + self._scores(length) - self._scores(length - count)
            for length, count in zip(lengths, lengths if computed is None else computed, strict=True)
        )
        return body + (4.0 if self.frozen_head else 6.0) * self.head * trained


def _attention_layers(text: Any) -> tuple[int, int]:
    window, layers = getattr(text, "sliding_window", None), text.num_hidden_layers
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    if kinds is None:
        kinds = ["sliding_attention" if window else "full_attention"] * layers
    if text.model_type in _STATES_ONLY:
        kinds = []
    windowed = sum(kind == "sliding_attention" for kind in kinds) if window else 0
    return sum(kind in _ATTENTION for kind in kinds) - windowed, windowed


def describe_flops(
    flops: float, seconds: float, ranks: int, device: torch.device, peak: float | None = None
) -> dict[str, float]:
    """Return throughput/train_tflops_per_second_per_rank and, where the peak of the device is known, throughput/mfu.

    Args:
        flops: of all ranks together, in `seconds`.
        peak: TFLOP/s of one device; None: the maker's figure, of a GPU that is a known one.
    """
    rate = flops / seconds / ranks / 1e12
    if peak is None and device.type == "cuda":
        peak = peak_tflops(torch.cuda.get_device_name(device))
    return {"throughput/train_tflops_per_second_per_rank": rate} | ({"throughput/mfu": rate / peak} if peak else {})


def peak_tflops(name: str) -> float | None:
    """Return the bf16 peak of a GPU by its name, such as "NVIDIA H100 80GB HBM3"; None: it is not known."""
    return next((peak for known, peak in _PEAK_TFLOPS.items() if re.search(rf"\b{known}\b", name)), None)
