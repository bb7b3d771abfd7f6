"""Memory of a model on a rank, in bytes: pure arithmetic on the shapes of its parameters and on sizes.

Weights, gradients and optimizer state are what the engines hold, byte by byte. What lives during passes only is estimated.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from hpcrl.config.rules.model_fit import HeadShare

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}

EMBEDDING, HEAD = -1, -2
"""Units of their own."""

_MOMENTS = 2  # of Adam; one of what Muon moves
_OUTER, _LAYER = ("embed", "lm_head", "score", "conv", "_table"), re.compile(r"(^|\.)\d+\.")
_BLOCK, _LEAST_8BIT, _CODES = 256, 4096, 256  # of torchao's moments of 8 bits
_STEP = 4  # Adam counts the steps of each parameter in a float32
_WEIGHT_SUM = 8  # and schedule-free AdamW sums the weights of its average in a float64
_LOGIT_COPIES = 5  # float32 or logprob_dtype [rows, V] at a time: logits, log-probabilities, their exponentials, products, a gradient


@dataclass(frozen=True)
class Weight:
    """A parameter.

    Attributes:
        name: as transformers call it.
        trained: it has a gradient and moments.
        unit: number of the FSDP unit that it is in; 0: the root's; EMBEDDING or HEAD: that one's.
        spread: ranks that share it by experts: FSDP gathers so much less of it.
    """

    name: str
    shape: tuple[int, ...]
    trained: bool = True
    unit: int = 0
    spread: int = 1

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def moved_by_muon(self) -> bool:
        """Whether it is a matrix, or a stack of experts, of the hidden layers, whose names have numbers."""
        inner = _LAYER.search(self.name) and not any(text in self.name for text in _OUTER)
        return bool(inner) and len(self.shape) in (2, 3) and min(self.shape[-2:]) > 1

    def on(self, ranks: int, index: int = 0) -> int:
        """Return the number of a parameter's elements on one FSDP2 rank. Ranks have equally many rows (first dimension), the last ones the
        rest; parallel experts are spread evenly."""
        if self.spread > 1:
            return self.count // ranks
        rows = -(-self.shape[0] // ranks)
        return max(0, min(rows, self.shape[0] - index * rows)) * math.prod(self.shape[1:])


@dataclass(frozen=True, kw_only=True)
class Width:
    """Sizes by which activations are counted.

    Attributes:
        ffn: inner columns that each token passes: of the MLP, or of the experts that it goes to, shared ones included.
        norms_heads: queries and keys are normed, as in Qwen3.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    ffn: int
    vocabulary: int
    norms_heads: bool = False


@dataclass(frozen=True)
class Shapes:
    """A model, as far as its memory depends on it.

    Attributes:
        kind: name of its class.
        weights: its parameters; tied ones once.
    """

    kind: str
    weights: list[Weight]
    width: Width

    @property
    def count(self) -> int:
        return sum(weight.count for weight in self.weights)


@dataclass(frozen=True, kw_only=True)
class Need:
    """Bytes of one model on one rank.

    Attributes:
        gathered: parameters that FSDP has gathered, and gradients that it has not yet reduced.
        recomputed: of the activations those of a layer that is computed again, which are there once the logits are not.
        stays: gradients are kept between optimizer steps, as Megatron-core's buffers are.
    """

    weights: int
    gradients: int
    optimizer: int
    gathered: int = 0
    activations: int = 0
    recomputed: int = 0
    logprobs: int = 0
    stays: bool = False

    @property
    def resident(self) -> int:
        """Bytes that are there at any time."""
        return self.weights + self.optimizer + (self.gradients if self.stays else 0)

    @property
    def working(self) -> int:
        """Bytes that are there while this model is trained, beside those."""
        passing = max(self.logprobs - self.recomputed, 0)
        return self.gathered + self.activations + passing + (0 if self.stays else self.gradients)


def peak(needs: Sequence[Need]) -> int:
    """Return the bytes of several models of which one at a time is trained or asked."""
    return sum(need.resident for need in needs) + max((need.working for need in needs), default=0)


def fsdp_state(
    weights: Sequence[Weight],
    ranks: int,
    dtype: str,
    index: int = 0,
    *,
    frozen_dtype: str | None = None,
    twice: bool = False,
    moments: str | None = None,
    muon: bool = False,
    schedule_free: bool = False,
) -> Need:
    """Return the bytes of a model's state with FSDP2 on a rank; gradients between backward and step only.

    Args:
        ranks: that share one copy.
        dtype: of master weights (mixed_precision.master_dtype), of which gradients and Adam's moments are too.
        index: of the rank among them; the first has most.
        frozen_dtype: of what is not trained; None: the same.
        twice: whether what is trained is there once more, as it is in the reference.
        moments: optimizer_config.moments.
        muon: whether Muon moves matrices.
        schedule_free: whether schedule-free AdamW moves all, which keeps a second set of weights in the place of a moment.
    """
    size, trained = BYTES[dtype], [weight for weight in weights if weight.trained]
    of_each = [weight.on(ranks, index) for weight in trained]
    of_adam = [count for weight, count in zip(trained, of_each, strict=True) if not (muon and weight.moved_by_muon)]
    held = sum(of_each)
    frozen = sum(weight.on(ranks, index) for weight in weights if not weight.trained)
    return Need(
        weights=(1 + twice) * size * held + BYTES[frozen_dtype or dtype] * frozen,
        gradients=size * held,
        optimizer=_MOMENTS * sum(_moment(count, size, moments) for count in of_adam)
        + (_STEP + _WEIGHT_SUM * schedule_free) * len(of_adam)
        + size * (held - sum(of_adam)),
    )


def _moment(count: int, size: int, kept: str | None) -> int:
    """Return the bytes of one moment of a parameter, `size` bytes a number where nothing else is chosen."""
    if kept == "8bit" and count >= _LEAST_8BIT and count % _BLOCK == 0:
        return count + 4 * (count // _BLOCK) + 4 * _CODES  # codes, a float32 for each block, and what codes stand for
    return count * (BYTES["bf16"] if kept == "bf16" else size)


def fsdp_gathered(weights: Sequence[Weight], ranks: int, param_dtype: str, reduce_dtype: str, keep: bool | int) -> int:
    """Return the bytes that FSDP2 gathers at most, with gradients that are not reduced yet.

    What the root has (last norm, a tied embedding) stays gathered from forward to the end of backward, and its gradient as long. Beside it are
    the layer that computes and the next one, or the head, whose gradient is added up in float32, and the last layer, or the embedding. What
    arrives is copied into the parameter; of layers that is not counted.

    Args:
        keep: fsdp_config.reshard_after_forward.
    """
    units, trained = defaultdict[int, int](int), defaultdict[int, int](int)
    for weight in weights:
        units[weight.unit] += weight.count // weight.spread
        trained[weight.unit] += weight.count // weight.spread * weight.trained
    (root, root_trained), (embedding, embedding_trained), (head, head_trained) = (
        (units.pop(unit, 0), trained.pop(unit, 0)) for unit in (0, EMBEDDING, HEAD)
    )
    size, sent = BYTES[param_dtype], BYTES[reduce_dtype]
    most, most_trained = max(units.values(), default=0), max(trained.values(), default=0)
    inner = sum(units.values())
    if keep is False:
        stays, in_turn = inner * size, 0
    else:
        stays, in_turn = inner * size // keep if keep is not True and keep < ranks else 0, min(2 * most, inner) * size
    of_layer = in_turn + max(most_trained * (size + sent), root_trained * sent)
    of_head = max(2 * head * size, head * size + head_trained * (size + BYTES["fp32"]) + in_turn // 2)
    of_embedding = max(2 * embedding * size, embedding_trained * (size + sent))
    return (root + root_trained) * size + stays + max(of_layer, of_head, of_embedding)


def megatron_state(
    dense: int,
    experts: int,
    copies: int,
    expert_copies: int,
    *,
    bf16: bool = True,
    fp32_gradients: bool = True,
    distributed: bool = True,
    offloaded: float = 0.0,
    frozen: int = 0,
    twice: bool = False,
    by_muon: tuple[int, int] = (0, 0),
) -> Need:
    """Return the bytes of a model's state with Megatron-core on a rank.

    bf16 weights have an fp32 master copy and fp32 moments, which the distributed optimizer divides among the d copies of the model.
    That is 6 + 12 / d bytes per parameter with fp32 gradients, 8 + 8 / d in fp32 (Megatron-core's documentation, "Distributed Optimizer").

    Args:
        dense, experts: trained parameters of this rank, without experts and of experts.
        copies, expert_copies: ranks that hold the same parameters.
        fp32_gradients: ddp_config.grad_reduce_in_fp32.
        offloaded: share of the optimizer's state in host memory.
        frozen: parameters that are not trained.
        twice: whether what is trained is there once more, as it is in the reference.
        by_muon: how many of `dense` and of `experts` Muon moves, which have one moment in place of two.
    """
    size = 2 if bf16 else 4
    gradient = 4 if fp32_gradients else size
    state = 4 * _MOMENTS + (4 if bf16 else 0)
    sharing = (copies, expert_copies) if distributed else (1, 1)
    own, of_muon = (
        sum(-(-count // ranks) for count, ranks in zip(counts, sharing, strict=True))
        for counts in ((dense, experts), by_muon)
    )
    return Need(
        weights=size * ((1 + twice) * (dense + experts) + frozen),
        gradients=gradient * (dense + experts),
        optimizer=round((state * own - 4 * of_muon) * (1 - offloaded)),
        stays=True,
    )


def layer_activations(width: Width, size: int, *, fused: bool) -> int:
    """Return the bytes that one layer keeps of one token for backward.

    V. Korthikanti et al. (arXiv:2205.05198), equation 1, for layers with RMSNorm, gated MLP and grouped queries, without dropout, and
    with attention that keeps no scores. Kept are inputs of norms and linear layers, queries, keys, values and the result of attention. The
    MLP keeps both columns, their product and, unless `fused`, the activated column. Transformers compute norms in float32 and keep those inputs too.

    Args:
        size: bytes of a number.
        fused: kernels of Megatron-core.
    """
    heads = (width.heads + width.kv_heads) * width.head
    norms = (2 * width.hidden + heads * width.norms_heads) * (size if fused else 4 + size)
    inputs = 2 * width.hidden * size
    attention = 2 * heads * size + 4 * width.heads
    return norms + inputs + attention + width.ffn * size * (3 if fused else 4)


def activations(
    width: Width, tokens: int, size: int, *, fused: bool, recompute: bool, layers: int, passes: int = 1, every: int = 1
) -> int:
    """Return the bytes that a rank keeps for backward.

    Args:
        tokens: of the largest micro-batch that this rank computes with: those that sequence and context parallelism leave it.
        size: bytes of a number.
        recompute: only inputs of layers are kept, and the rest of one layer at a time (full recomputation).
        layers: of this rank.
        passes: micro-batches whose backward is still to come; the first stage of a pipeline has as many as there are stages
            (arXiv:2205.05198, section 4.2.3).
        every: layers that are recomputed together.
    """
    one = layer_activations(width, size, fused=fused)
    if not recompute:
        return tokens * layers * passes * one
    kept = -(-layers // every) * width.hidden * size
    return tokens * (kept * passes + min(every, layers) * one)


def recomputed_activations(
    width: Width, tokens: int, size: int, *, every: int = 1, attention: bool = False, offloaded: bool = False
) -> int:
    """Return the bytes that a rank of FSDP2 keeps for backward where layers are computed again.

    Args:
        tokens: of the largest micro-batch.
        size: bytes of a number.
        every: one of so many layers is computed again; the others keep all.
        attention: results of attention, with a float32 per head, are kept of these layers too.
        offloaded: what is kept of these layers is in host memory, but for that of one layer.
    """
    one = layer_activations(width, size, fused=False)
    again = -(-width.layers // every)
    kept = width.hidden * size + (width.heads * (width.head * size + 4) if attention else 0)
    inputs = width.hidden * size
    on_device = again * (kept - inputs) + inputs if offloaded else again * kept
    return tokens * ((width.layers - again) * one + on_device + one)


def copied_keys(width: Width, tokens: int, size: int, *, recompute: bool) -> int:
    """Return the bytes of copies of keys and values, which samples have of prefixes that are computed once.

    Args:
        tokens: that are copied, of the largest micro-batch.
        size: bytes of a number.
    """
    return 2 * width.kv_heads * width.head * size * tokens * (1 if recompute else width.layers)


def exchanged_heads(width: Width, tokens: int, ranks: int, size: int, *, recompute: bool) -> int:
    """Return the bytes that sequence-parallel ranks keep beside their own activations.

    These are results of attention before and after their exchange, and the heads of keys and values that several ranks have.

    Args:
        tokens: of this rank, of the largest micro-batch.
        ranks: that share them.
        size: bytes of a number.
    """
    if ranks == 1:
        return 0
    most = max(len(share.keys) for share in HeadShare.of(width.heads, width.kv_heads, ranks))
    columns = (width.heads + 2 * (most * ranks - width.kv_heads)) * width.head
    return columns * size * tokens * (1 if recompute else width.layers)


def merged_experts(weights: Sequence[Weight], dtype: str, *, recompute: bool) -> int:
    """Return the bytes of experts that are merged with their adapters to compute with them, and of their gradient, one layer at a time.

    Without recomputation the merged ones are kept for backward.

    Args:
        dtype: of the computation.
    """
    adapted = [weight for weight in weights if len(weight.shape) == 3 and ".base_layer." in weight.name]
    of_layers = [sum(weight.count for weight in adapted if weight.unit == unit) for unit in {w.unit for w in adapted}]
    most = max(of_layers, default=0)
    return BYTES[dtype] * (most + (most if recompute else sum(of_layers)))


def logprob_buffer(rows: int, vocabulary: int, size: int) -> int:
    """Return the bytes of the slices of logits that log-probabilities are computed from, with what is made of them.

    Args:
        rows: tokens whose logits exist at the same time.
        vocabulary: columns of this rank.
        size: bytes of a number of trainer.algorithm.logprob_dtype.
    """
    return _LOGIT_COPIES * size * rows * vocabulary
