"""Megatron-core's groups of ranks, and which layers each pipeline stage has: arithmetic on sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hpcrl.config.sections.megatron import MegatronConfig, MegatronModelConfig

Groups = list[tuple[int, ...]]

_OTHER_SPLITS = (
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
_FIRST, _LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"


@dataclass(frozen=True)
class ParallelLayout:
    """Parallel sizes of ranks, in Megatron-core's order tp-cp-ep-dp-pp: neighbours are tensor parallel.

    Attributes:
        ranks: all of them.
    """

    ranks: int
    tensor: int
    context: int
    pipeline: int
    expert: int
    expert_tensor: int

    @classmethod
    def of(cls, sizes: MegatronModelConfig, ranks: int) -> ParallelLayout:
        return cls(
            ranks,
            sizes.tensor_model_parallel_size,
            sizes.context_parallel_size,
            sizes.pipeline_model_parallel_size,
            sizes.expert_model_parallel_size,
            sizes.experts_tensor_size,
        )

    @property
    def data(self) -> int:
        """Copies of the model that train different samples."""
        return self.ranks // (self.tensor * self.context * self.pipeline)

    @property
    def expert_data(self) -> int:
        """Copies of each expert."""
        return self.ranks // (self.expert_tensor * self.expert * self.pipeline)

    def groups(self) -> dict[str, Groups]:
        """Return the ranks of each group, by its name: TP, CP, DP, PP, and of experts ETP, EP, EDP."""
        dense = {"TP": self.tensor, "CP": self.context, "DP": self.data, "PP": self.pipeline}
        experts = {"ETP": self.expert_tensor, "EP": self.expert, "EDP": self.expert_data, "PP": self.pipeline}
        return {name: _groups(dense, name) for name in dense} | {
            name: _groups(experts, name) for name in ("ETP", "EP", "EDP")
        }

    def ranks_of_stage(self, stage: int) -> range:
        """Return the ranks of a pipeline stage, which follow each other."""
        width = self.ranks // self.pipeline
        return range(stage * width, (stage + 1) * width)

    def sample_multiple(self) -> int:
        """Return the number to whose multiple a sample's tokens are padded. Context parallelism cuts a sample into 2 parts per rank;
        sequence parallelism, which comes with tensor parallelism, divides each of those among the ranks."""
        return self.tensor * (2 * self.context if self.context > 1 else 1)


def _groups(sizes: Mapping[str, int], name: str) -> Groups:
    """Return the ranks that differ in `name` alone; a rank's number counts `sizes` up, the first one fastest."""
    names = list(sizes)
    stride = math.prod(sizes[other] for other in names[: names.index(name)])
    first = [rank for rank in range(math.prod(sizes.values())) if rank // stride % sizes[name] == 0]
    return [tuple(rank + stride * at for at in range(sizes[name])) for rank in first]


def on_one_rank(megatron: MegatronConfig) -> MegatronConfig:
    """Return the section for a process that holds the whole model; how the model computes stays the same."""
    split = (*_OTHER_SPLITS, _FIRST, _LAST)
    kept = {name: value for name, value in megatron.transformer_config_kwargs.items() if name not in split}
    whole = MegatronConfig()
    return replace(
        megatron,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        context_parallel_size=1,
        expert_model_parallel_size=1,
        expert_tensor_parallel_size=None,
        pipeline_schedule=whole.pipeline_schedule,
        pipeline_layers_per_stage=None,
        transformer_config_kwargs=kept,
        ddp_config=whole.ddp_config,
        optimizer_config_kwargs=whole.optimizer_config_kwargs,
    )


def padded(count: int, multiple: int) -> int:
    """Return the next multiple, such as the rows of a vocabulary that ranks share equally."""
    return -(-count // multiple) * multiple


def given_stages(sizes: MegatronModelConfig) -> tuple[int | None, int | None] | None:
    """Return the layers that transformer_config_kwargs gives the first and the last stage; None: they are split in another way."""
    options: dict[str, Any] = sizes.transformer_config_kwargs
    if any(options.get(name) for name in _OTHER_SPLITS):
        return None
    return options.get(_FIRST), options.get(_LAST)


def layers_of_stages(layers: int, sizes: MegatronModelConfig) -> list[int] | None:
    """Return how many layers each pipeline stage has; None where hpcrl does not know, or stages cannot have equally many."""
    given = given_stages(sizes)
    if given is None:
        return None
    stages, (first, last) = sizes.pipeline_model_parallel_size, given
    between = stages - sum(own is not None for own in given)
    rest = layers - sum(own for own in given if own is not None)
    if between < 0 or rest < between or (rest % between if between else rest):
        return None
    even = [rest // between] * between if between else []
    return [*([first] if first is not None else []), *even, *([last] if last is not None else [])]
