"""How many parameters each pipeline stage of Megatron-core has on a rank, from the parameters of the transformers model."""

from __future__ import annotations

import re
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
_EMBEDDING, _HEAD = re.compile(r"(?:^|\.)embed_tokens\.weight$"), re.compile(r"(?:^|\.)lm_head\.weight$")


@dataclass(frozen=True)
class StageParameters:
    """Parameters of each rank of a pipeline stage.

    Attributes:
        experts: those of experts, which other ranks share than the dense rest.
    """

    dense: int
    experts: int

    @property
    def count(self) -> int:
        return self.dense + self.experts


def stage_parameters(
    weights: Iterable[Weight],
    layout: ParallelLayout,
    stages: Sequence[int],
    per_stage: int | None = None,
    value_head: str | None = None,
) -> list[StageParameters]:
    """Return the parameters of a rank of each pipeline stage.

    A tied embedding lies on the first stage, and once more on the last one, where it is the head; its rows are padded to a multiple of
    the tensor parallel size.

    Args:
        stages: layers of each.
        per_stage: layers of a virtual stage, in an interleaved schedule.
        value_head: name of a critic's head.

    Raises:
        DataError: the model has parameters that hpcrl does not know how to share.
    """
    dense, experts = [0] * layout.pipeline, [0] * layout.pipeline
    weights, stage_of = list(weights), _stages_of_layers(stages, per_stage)
    tied = value_head is None and not any(_HEAD.search(weight.name) for weight in weights)
    for weight in weights:
        stage, layer = 0, _LAYER.search(weight.name)
        if layer:
            stage = stage_of[int(layer[1])]
        elif not _EMBEDDING.search(weight.name):
            stage = layout.pipeline - 1
        if _EMBEDDING.search(weight.name) or _HEAD.search(weight.name):
            own = padded(weight.shape[0], layout.tensor) // layout.tensor * weight.shape[1]
            dense[stage] += own
            if tied and layout.pipeline > 1:
                dense[-1] += own
        elif _EXPERTS.search(weight.name):
            experts[stage] += weight.count // (layout.expert * layout.expert_tensor)
        elif _SPLIT.search(weight.name):
            dense[stage] += weight.count // layout.tensor
        elif _WHOLE.search(weight.name) or weight.name == f"{value_head}.weight":
            dense[stage] += weight.count
        else:
            raise DataError(f"how Megatron's ranks share {weight.name} is not known, so its memory cannot be estimated")
    return [StageParameters(*counts) for counts in zip(dense, experts, strict=True)]


def _stages_of_layers(stages: Sequence[int], per_stage: int | None) -> list[int]:
    """Return the pipeline stage of each layer; in an interleaved schedule the stages take turns, a virtual stage each time."""
    turns = 1 if per_stage is None else max(stages) // per_stage
    return [stage for _ in range(turns) for stage, layers in enumerate(stages) for _ in range(layers // turns)]
