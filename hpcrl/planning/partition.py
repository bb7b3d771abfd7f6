"""Counts the parameters of each pipeline stage of Megatron-core on a rank, from those of the transformers model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hpcrl.config.rules.megatron_groups import ParallelLayout, padded
from hpcrl.errors import DataError
from hpcrl.planning.memory import Weight

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_EXPERTS = re.compile(r"\.experts\.(?:\d+\.)?(?:gate_up_proj|gate_proj|up_proj|down_proj)(?:\.weight)?$")
_SPLIT = re.compile(
    r"\.(?:[qkv]_proj\.(?:weight|bias)|o_proj\.weight|(?:gate|up|down)_proj\.weight|(?:gate|up)_proj\.bias)$"
)
_WHOLE = re.compile(
    r"(?:norm\.weight|o_proj\.bias|down_proj\.bias|mlp\.gate\.weight|router\.weight|shared_expert_gate\.weight)$"
)
_ADAPTER = re.compile(r"\.(?P<layer>\w+)\.lora_(?P<letter>[AB])\.default\.weight$")
_WRAPPED = re.compile(r"(\.base_layer)+\.")
_BY_COLUMNS = ("o_proj", "down_proj")
# with one A for the layers of transformers in one of Megatron-core's: that of the first
_WITHOUT_A = ("k_proj", "v_proj", "up_proj")
_EMBEDDING, _HEAD = re.compile(r"(?:^|\.)embed_tokens\.weight$"), re.compile(r"(?:^|\.)lm_head\.weight$")


@dataclass(frozen=True)
class StageParameters:
    """Parameters of each rank of a pipeline stage.

    Attributes:
        dense, experts: trained parameters without experts, and of experts, which other ranks share.
        frozen: those that are not.
        dense_matrices, expert_matrices: those of dense and of experts that Muon moves.
    """

    dense: int
    experts: int
    frozen: int = 0
    dense_matrices: int = 0
    expert_matrices: int = 0

    @property
    def count(self) -> int:
        return self.dense + self.experts + self.frozen


def stage_parameters(
    weights: Iterable[Weight],
    layout: ParallelLayout,
    stages: Sequence[int],
    per_stage: int | None = None,
    value_head: str | None = None,
    *,
    one_A: bool = False,
) -> list[StageParameters]:
    """Return the parameters of a rank of each pipeline stage.

    A tied embedding lies on the first stage, and again on the last one, where it is the head. Its rows are padded to a multiple of
    the tensor parallel size.

    Args:
        stages: layers of each.
        per_stage: layers of a virtual stage, in an interleaved schedule.
        value_head: name of the head of a critic, or of a reward model.
        one_A: adapters of layers that Megatron-core has as one share their first matrix (lora_type "lora").
    """
    counts = [Counter[str](dense=0, experts=0) for _ in range(layout.pipeline)]
    weights, stage_of = list(weights), _stages_of_layers(stages, per_stage)
    tied = value_head is None and not any(_HEAD.search(weight.name) for weight in weights)
    for weight in weights:
        name, stage = _WRAPPED.sub(".", weight.name), 0
        if layer := _LAYER.search(name):
            stage = stage_of[int(layer[1])]
        elif not _EMBEDDING.search(name):
            stage = layout.pipeline - 1
        of_expert, own = ".experts." in name, _share(name, weight, layout, value_head, one_A)
        kind = ("experts" if of_expert else "dense") if weight.trained else "frozen"
        counts[stage][kind] += own
        if weight.trained and weight.moved_by_muon:
            counts[stage]["expert_matrices" if of_expert else "dense_matrices"] += own
        if tied and layout.pipeline > 1 and _EMBEDDING.search(name):
            counts[-1][kind] += own
    return [StageParameters(**found) for found in counts]


def _share(name: str, weight: Weight, layout: ParallelLayout, value_head: str | None, one_A: bool) -> int:
    if _EMBEDDING.search(name) or _HEAD.search(name):
        return padded(weight.shape[0], layout.tensor) // layout.tensor * weight.shape[1]
    if adapter := _ADAPTER.search(name):
        if (
            adapter["layer"] == "experts"
        ):  # one of the two is split among the ranks that share an expert; which one, the name does not tell
            return weight.count // layout.expert
        if one_A and adapter["letter"] == "A" and adapter["layer"] in _WITHOUT_A:
            return 0
        split = (adapter["layer"] in _BY_COLUMNS) == (adapter["letter"] == "A")
        return weight.count // layout.tensor if split else weight.count
    if _EXPERTS.search(name):
        return weight.count // (layout.expert * layout.expert_tensor)
    if _SPLIT.search(name):
        return weight.count // layout.tensor
    if _WHOLE.search(name) or name == f"{value_head}.weight":
        return weight.count
    raise DataError(f"how Megatron's ranks share {name} is not known, so its memory cannot be estimated")


def _stages_of_layers(stages: Sequence[int], per_stage: int | None) -> list[int]:
    turns = 1 if per_stage is None else max(stages) // per_stage
    return [stage for _ in range(turns) for stage, layers in enumerate(stages) for _ in range(layers // turns)]
