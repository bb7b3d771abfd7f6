"""Checkpoint format of all backends: whole tensors under transformers' names, each rank writing and reading its shards.

    model.model.<name>                       weights, under the names of transformers' model in memory (PEFT's, for adapters)
    optimizer.state.model.<name>.<moment>    of what is trained: exp_avg, exp_avg_sq and step; momentum_buffer of what Muon moves;
                                             z and weight_sum for exp_avg with schedule-free AdamW
    updates                                  optimizer steps done

So any backend, on any number of ranks, resumes from another's checkpoint. torch.distributed.checkpoint writes and reads the files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Size
from torch.distributed import ProcessGroup, get_global_rank
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from hpcrl.errors import CommitError
from hpcrl.rundir.checkpoint_index import INDEX, read_index
from hpcrl.trainer.distributed import World, broadcast_json

PREFIX = "model."
"""Prefix of parameter names: engines hold transformers' model under it."""

_OF_MEGATRON = "common.pt"  # in checkpoints by Megatron-core's own format


@dataclass(frozen=True)
class Shard:
    """A rectangle of a tensor.

    Attributes:
        offsets: where it begins, in each dimension.
        values: of the tensor's dimensions; loading writes into them.
    """

    offsets: tuple[int, ...]
    values: torch.Tensor


class LocalShards(torch.Tensor):
    """A tensor of which this rank has some shards, for torch.distributed.checkpoint. It has no values of its own.

    Attributes:
        shards: of this rank. Those that are written do not overlap on one rank, and of replicas one rank alone has them here.
    """

    shards: list[Shard]

    @staticmethod
    def of(shape: Sequence[int], shards: Sequence[Shard]) -> LocalShards:
        """Return a tensor of this shape with these shards."""
        nothing = torch.empty((), dtype=shards[0].values.dtype).expand(tuple(shape))
        made = torch.Tensor._make_subclass(LocalShards, nothing)
        made.shards = list(shards)
        return made

    def copied(self) -> LocalShards:
        """Return a copy in host memory."""
        return LocalShards.of(
            self.shape, [Shard(shard.offsets, shard.values.detach().to("cpu", copy=True)) for shard in self.shards]
        )

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(name, Size(shard.offsets)),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    _chunk(shard), TensorProperties.create_from_tensor(shard.values), Size(self.shape)
                ),
            )
            for shard in self.shards
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(shard) for shard in self.shards]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        # when reading, two shards may begin at the same offsets; when writing, torch gives other indices than ours
        number, offsets = index.index, tuple(index.offset or ())
        if number is not None and number < len(self.shards) and self.shards[number].offsets == offsets:
            return self.shards[number].values
        return next(shard.values for shard in self.shards if shard.offsets == offsets)


def _chunk(shard: Shard) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(Size(shard.offsets), shard.values.shape)


def write(state: dict[str, Any], directory: Path, group: ProcessGroup) -> None:
    """Write tensors, each rank its shards. All ranks of the group call it."""
    save(state, checkpoint_id=directory, process_group=group)


def write_folders(states: dict[str, dict[str, Any]], directory: Path, group: ProcessGroup) -> None:
    """Write each state into its folder of `directory`. All ranks of the group call it, also those without the model; the first rank names the
    folders."""
    for folder in broadcast_json(list(states), get_global_rank(group, 0), group):
        write(states.get(folder, {}), directory / folder, group)


def read(state: dict[str, Any], directory: Path, world: World, *, partly: bool = False) -> None:
    """Load the checkpoint that `write` wrote into the tensors of `state`. All ranks call it.

    Args:
        partly: leave tensors unchanged that the checkpoint lacks.

    Raises:
        CommitError: on every rank: it is not there, of another shape, in the format of an earlier version, or its index could run code.
    """
    reader = _Reader(directory)
    world.all_gather(reader.open)  # an error of one rank is raised on all
    try:
        load(
            state,
            storage_reader=reader,
            process_group=world.control,
            planner=DefaultLoadPlanner(allow_partial_load=partly),
        )
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        hint = (
            "; with lora_type=lora layers share adapters, and with target_parameters each backend has those of experts in its own way"
            if ".lora_" in str(cause)
            else ""
        )
        raise CommitError(f"{directory} cannot be loaded: {cause}{hint}") from error


def names_in(directory: Path, world: World) -> set[str]:
    """Return the names of the tensors in a checkpoint. All ranks call it; errors as of `read`."""
    reader = _Reader(directory)
    world.all_gather(reader.open)
    return set(reader.read_metadata().state_dict_metadata)


class _Reader(FileSystemReader):
    """Reads a checkpoint whose index is parsed as data: torch's own reader unpickles it, and so could run code."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._index: Metadata | None = None

    def open(self) -> None:
        """Read the index. Raises CommitError as `read_index` does, or for another format."""
        directory = Path(self.path)
        _require_readable(directory)
        index = read_index(directory)
        try:
            self._index = Metadata(
                # None: what torch would unpickle, which no state has
                {
                    name: _tensor(one.state)
                    for name, one in index["state_dict_metadata"].items()
                    if one.state is not None
                },
                storage_data={_key(key.state): _place(one.state) for key, one in index["storage_data"].items()},
            )
        except (AttributeError, LookupError, TypeError) as error:
            raise CommitError(f"{directory / INDEX} is no index of a checkpoint: {error}") from error

    def read_metadata(self) -> Metadata:
        """Return the index of `open`."""
        assert self._index is not None
        return self._index


def _tensor(state: dict[str, Any]) -> TensorStorageMetadata:
    """Return the metadata of a tensor. Its properties are needed only where torch allocates the tensors that it loads into."""
    chunks = [ChunkStorageMetadata(Size(one.state["offsets"]), Size(one.state["sizes"])) for one in state["chunks"]]
    return TensorStorageMetadata(TensorProperties(), Size(state["size"]), chunks)


def _key(state: dict[str, Any]) -> MetadataIndex:
    return MetadataIndex(state["fqn"], state.get("offset"))


def _place(state: dict[str, Any]) -> _StorageInfo:
    return _StorageInfo(state["relative_path"], state["offset"], state["length"])


def _require_readable(directory: Path) -> None:
    if (directory / _OF_MEGATRON).exists():
        raise CommitError(
            f"{directory} was written by trainer.strategy=megatron of an earlier version of hpcrl, whose format is not supported any more; "
            "export it with that version (hpcrl checkpoint export). Then start a new run from the export"
        )
