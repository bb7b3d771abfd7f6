"""What the engines of all backends write into a checkpoint, and read from it: whole tensors under transformers' names, of which each rank has parts.

    model.model.<name>                       weights, under the names of transformers' model in memory (PEFT's, for adapters)
    optimizer.state.model.<name>.<moment>    of what is trained: exp_avg, exp_avg_sq and step
    updates                                  optimizer steps done

So any backend, on any number of ranks, goes on from what another one wrote. torch's distributed checkpoints write and read the files.
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
from hpcrl.trainer.distributed import World, tell

PREFIX = "model."
"""Of the names of a model's parameters: engines hold transformers' model under it."""

_OF_MEGATRON = "common.pt"  # in checkpoints by Megatron-core's own format


@dataclass(frozen=True)
class Share:
    """A part of a tensor.

    Attributes:
        offsets: where it begins, in each dimension.
        values: of the tensor's dimensions; what is read is put there.
    """

    offsets: tuple[int, ...]
    values: torch.Tensor


class Shares(torch.Tensor):
    """A tensor of which this rank has some parts, as torch's distributed checkpoints take one. It has no values of its own.

    Attributes:
        parts: of this rank. Those that are written do not overlap on one rank; what several ranks have, one of them writes.
    """

    parts: list[Share]

    @staticmethod
    def of(shape: Sequence[int], parts: Sequence[Share]) -> Shares:
        """Return the tensor of a shape."""
        nothing = torch.empty((), dtype=parts[0].values.dtype).expand(tuple(shape))
        made = torch.Tensor._make_subclass(Shares, nothing)
        made.parts = list(parts)
        return made

    def copied(self) -> Shares:
        """Return the same with copies of the values, in host memory."""
        return Shares.of(
            self.shape, [Share(part.offsets, part.values.detach().to("cpu", copy=True)) for part in self.parts]
        )

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(name, Size(part.offsets)),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    _chunk(part), TensorProperties.create_from_tensor(part.values), Size(self.shape)
                ),
            )
            for part in self.parts
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(part) for part in self.parts]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        # where it is read, two parts may begin at the same place; where it is written, torch gives other numbers than ours
        number, offsets = index.index, tuple(index.offset or ())
        if number is not None and number < len(self.parts) and self.parts[number].offsets == offsets:
            return self.parts[number].values
        return next(part.values for part in self.parts if part.offsets == offsets)


def _chunk(part: Share) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(Size(part.offsets), part.values.shape)


def write(state: dict[str, Any], directory: Path, group: ProcessGroup) -> None:
    """Write tensors, each rank its parts. All ranks of the group call it."""
    save(state, checkpoint_id=directory, process_group=group)


def write_folders(states: dict[str, dict[str, Any]], directory: Path, group: ProcessGroup) -> None:
    """Write each state into its folder of `directory`. All ranks of the group call it; the first one says which folders there are, and a rank
    without the model has no part of any."""
    for folder in tell(list(states), get_global_rank(group, 0), group):
        write(states.get(folder, {}), directory / folder, group)


def read(state: dict[str, Any], directory: Path, world: World, *, partly: bool = False) -> None:
    """Read what `write` has written into the tensors of `state`. All ranks call it.

    Args:
        partly: leave as it is what the checkpoint does not have.

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


class _Reader(FileSystemReader):
    """A reader of a checkpoint's files whose index is data: torch's own unpickles it, and runs what it names.

    Args:
        directory: of the checkpoint, or a folder of one.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._index: Metadata | None = None

    def open(self) -> None:
        """Read the index. Raises CommitError as `read_index` does, or where it is not of this format."""
        directory = Path(self.path)
        _require_readable(directory)
        found = read_index(directory)
        try:
            self._index = Metadata(
                # None: what torch would unpickle, which no state has
                {
                    name: _tensor(one.state)
                    for name, one in found["state_dict_metadata"].items()
                    if one.state is not None
                },
                storage_data={_key(key.state): _place(one.state) for key, one in found["storage_data"].items()},
            )
        except (AttributeError, LookupError, TypeError) as error:
            raise CommitError(f"{directory / INDEX} is no index of a checkpoint: {error}") from error

    def read_metadata(self) -> Metadata:
        """Return the index that `open` has read."""
        assert self._index is not None
        return self._index


def _tensor(state: dict[str, Any]) -> TensorStorageMetadata:
    """Return what the index has of a tensor. Its properties are needed only where torch makes the tensors that it loads into."""
    chunks = [ChunkStorageMetadata(Size(one.state["offsets"]), Size(one.state["sizes"])) for one in state["chunks"]]
    return TensorStorageMetadata(TensorProperties(), Size(state["size"]), chunks)


def _key(state: dict[str, Any]) -> MetadataIndex:
    return MetadataIndex(state["fqn"], state.get("offset"))


def _place(state: dict[str, Any]) -> _StorageInfo:
    return _StorageInfo(state["relative_path"], state["offset"], state["length"])


def _require_readable(directory: Path) -> None:
    if (directory / _OF_MEGATRON).exists():
        raise CommitError(
            f"{directory} was written by trainer.strategy=megatron of an earlier version of hpcrl, in a format that this one does not read; "
            "export it with that version (hpcrl checkpoint export), and start a new run from the export"
        )
