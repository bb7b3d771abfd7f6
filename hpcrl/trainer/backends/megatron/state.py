"""Models and optimizers in checkpoints of Megatron-core's format (torch_dist), which any parallel layout can load.

Megatron-core decides which rank has what; torch's distributed checkpoints write the files, as for the FSDP2 backend: each rank its part, with the
group that the committer gives, from a copy if need be.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingConfig, CheckpointingException, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn.functional import pad

from hpcrl.errors import CommitError, ConfigError
from hpcrl.trainer.backends.base import Writer
from hpcrl.trainer.backends.megatron.adapters.whole import sharded_adapters
from hpcrl.trainer.distributed import tell

_MODEL = "model"
_RESHARDABLE = "fully_reshardable"


class ShardedState:
    """What a checkpoint has of one model: its weights and, if it is trained, its optimizer and the optimizer steps done.

    Args:
        chunks: bare, of this rank.
        optimizer: Megatron-core's; None: the model is not trained.
        reshardable: also the optimizer's state can be loaded by another layout; otherwise only by another number of data parallel ranks.
        adapted: the model has adapters, and what lies below them is not saved.
    """

    def __init__(self, chunks: Sequence[GPTModel], optimizer: Any, *, reshardable: bool, adapted: bool = False) -> None:
        self._chunks, self._optimizer, self._adapted = list(chunks), optimizer, adapted
        for part in optimizer.chained_optimizers if optimizer is not None else ():
            if isinstance(part, DistributedOptimizer):
                _keep_places(part)
                if isinstance(part.optimizer, torch.optim.Adam):
                    _keep_count(part)
        kind = _RESHARDABLE if reshardable else "dp_reshardable"
        self._metadata = {
            "distrib_optim_sharding_type": kind,
            "chained_optim_avoid_prefix": True,
            # otherwise a weight of all layers is one tensor, which a part of the layers would leave with holes
            "non_homogeneous_layers": adapted,
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }

    def writer(self, updates: int, *, copied: bool) -> Writer:
        """Return what writes the state.

        Args:
            updates: optimizer steps done.
            copied: to host memory, now; otherwise the state must not change until it is written.
        """
        state = self._weights()
        if self._optimizer is not None:
            _begin(self._optimizer)
            state["optimizer"] = self._optimizer.sharded_state_dict(state, metadata=self._metadata)
            state |= {"updates": updates, "layout": self._layout()}
        sharded: Any
        sharded, common = save_preprocess(state, validate_access_integrity=False)
        sharded, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, True)
        if copied:
            _copy(sharded)
            common = deepcopy(common)
        return partial(_write, mcore_to_pyt_state_dict(sharded, False), common)

    def load(self, directory: Path) -> int:
        """Load the state that a writer wrote, in the format that it chose; return the optimizer steps done.

        Raises:
            CommitError: it cannot be loaded.
            ConfigError: this layout cannot load it.
        """
        settings = [
            {name: group[name] for name in _SETTINGS if name in group} for group in self._optimizer.param_groups
        ]
        state = self._weights()
        _begin(self._optimizer)
        metadata = self._metadata | {"distrib_optim_sharding_type": self._format_of(directory)}
        state["optimizer"] = self._optimizer.sharded_state_dict(state, is_loading=True, metadata=metadata)
        loaded = _load(state, directory)
        self._take(loaded)
        with torch.no_grad():  # what the optimizer of an fp32 model steps are the model's own parameters
            self._optimizer.load_state_dict(loaded["optimizer"])
        for group, own in zip(self._optimizer.param_groups, settings, strict=True):
            group |= own  # not the settings of the run that saved
        _count_apart(self._optimizer)
        return int(loaded["updates"])

    def _format_of(self, directory: Path) -> str:
        common = _read(lambda: dist_checkpointing.load_common_state_dict(str(directory)), directory)
        optimizer, own = common.get("optimizer", {}), self._layout()
        parts = [optimizer, *(part for part in optimizer.values() if isinstance(part, dict))]
        formats = [part["param_state_sharding_type"] for part in parts if "param_state_sharding_type" in part]
        found, saved = formats[0] if formats else _RESHARDABLE, common.get("layout", own)
        if found != _RESHARDABLE and saved != own:
            names = ", ".join(f"{name} {saved[name]}, now {own[name]}" for name in own if saved[name] != own[name])
            raise ConfigError(
                f"trainer.policy.megatron_config: {directory} was saved with {names}, and with dist_ckpt_optim_fully_reshardable=false, for the "
                "sizes that it had. Go on with those; to change them later, set that to true, and change them after the next checkpoint"
            )
        return found

    def _layout(self) -> dict[str, int]:
        sizes = {
            "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
            "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
            "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
            "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
            "virtual stages": len(self._chunks),
        }
        return {name: size or 1 for name, size in sizes.items()}

    def load_weights(self, directory: Path) -> None:
        """Load only the model of what a writer wrote.

        Raises:
            CommitError: it cannot be loaded.
        """
        self._take(_load(self._weights(), directory))
        if self._optimizer is not None:
            self._optimizer.reload_model_params()

    def _weights(self) -> dict[str, Any]:
        return {name: self._of_chunk(chunk) for name, chunk in self._named()}

    def _of_chunk(self, chunk: GPTModel) -> dict[str, Any]:
        """Return what is saved of a chunk: all of it, or with adapters what is trained."""
        state = chunk.sharded_state_dict(metadata=self._metadata)
        if not self._adapted:
            return state
        trained = {name for name, parameter in chunk.named_parameters() if parameter.requires_grad}
        return {name: state[name] for name in state if name in trained} | sharded_adapters(chunk)

    def _take(self, loaded: dict[str, Any]) -> None:
        for name, chunk in self._named():
            chunk.load_state_dict(loaded[name], strict=not self._adapted)

    def _named(self) -> list[tuple[str, GPTModel]]:
        # the optimizer looks for these names
        many = len(self._chunks) > 1
        return [(f"{_MODEL}{number}" if many else _MODEL, chunk) for number, chunk in enumerate(self._chunks)]


_SETTINGS = ("lr", "weight_decay", "betas", "eps", "max_lr", "min_lr", "decoupled_weight_decay")


def _load(state: dict[str, Any], directory: Path) -> dict[str, Any]:
    return _read(lambda: dist_checkpointing.load(state, str(directory)), directory)


def _read(how: Callable[[], Any], directory: Path) -> dict[str, Any]:
    try:
        loaded = how()
    except (CheckpointingException, KeyError) as error:
        raise CommitError(
            f"{directory} cannot be loaded by trainer.strategy=megatron: {error}. Was it saved with another strategy? Then start a new run "
            "from an export of that one"
        ) from error
    assert isinstance(loaded, dict)
    return loaded


def _write(tensors: dict[str, Any], common: dict[str, Any], directory: Path, group: dist.ProcessGroup) -> None:
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    save(tensors, checkpoint_id=directory, process_group=group, planner=planner)
    failed = tell(_write_common(common, directory) if dist.get_rank() == 0 else None, 0, group)
    if failed:
        raise OSError(*failed)


def _write_common(common: dict[str, Any], directory: Path) -> tuple[int | None, str] | None:
    """Write what no rank has a part of; return the errno and the reason where it fails, for all ranks to know."""
    content = io.BytesIO()
    torch.save(common, content)  # to a file, it would hide the errno
    try:
        (directory / COMMON_STATE_FNAME).write_bytes(content.getvalue())
        save_config(CheckpointingConfig("torch_dist", 1), str(directory))
    except OSError as error:
        return error.errno, error.strerror or str(error)
    return None


def _copy(sharded: dict[str, list[Any]]) -> None:
    """Give the same tensors of their own, in host memory. What is no tensor is turned into bytes anyway."""
    for parts in sharded.values():
        for part in parts:
            if isinstance(part, ShardedTensor):
                assert part.data is not None
                part.data = part.data.detach().to("cpu", copy=True)


def _begin(optimizer: Any) -> None:
    """Give torch's Adam the state that it has before its first step, which Megatron-core expects to be there."""
    for inner in _adams(optimizer):
        for group in inner.param_groups:
            for parameter in group["params"]:
                if not inner.state[parameter]:
                    zero = torch.zeros_like(parameter.data)
                    inner.state[parameter] = {"step": torch.tensor(0.0), "exp_avg": zero, "exp_avg_sq": zero.clone()}


def _keep_places(optimizer: Any) -> None:
    """Let the optimizer find its state where it looks for it, which Megatron-core 0.16.1 gets wrong silently.

    It gathers buckets without the padding behind each, and then takes each parameter's part from its place with the padding: all that lies
    behind a padded bucket is mixed up. A tied embedding over several pipeline stages has a bucket of its own, and overlap_grad_reduce makes many.
    """
    gather = optimizer.get_parameter_state_dp_zero

    def gather_in_place(*args: Any, **kwargs: Any) -> Any:
        state = gather(*args, **kwargs)
        if state is None:
            return None
        for number, buffer in enumerate(optimizer.buffers):
            for tensors in state[number].values():
                for name in ("param", "exp_avg", "exp_avg_sq"):
                    tensors[name] = _with_padding(tensors[name], buffer.buckets)
        return state

    optimizer.get_parameter_state_dp_zero = gather_in_place


def _with_padding(values: torch.Tensor, buckets: Sequence[Any]) -> torch.Tensor:
    parts = values.split([bucket.numel_unpadded for bucket in buckets])
    sizes = [bucket.grad_data.numel() - bucket.numel_unpadded for bucket in buckets]
    return torch.cat([pad(part, (0, size)) for part, size in zip(parts, sizes, strict=True)])


def _keep_count(optimizer: Any) -> None:
    """Let the optimizer load the state of torch's Adam: it sets all that this has, but is not given the count of steps, which it has set."""
    put = optimizer._set_main_param_and_optimizer_states

    def put_all(parameter: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        group, place = optimizer.model_param_group_index_map[parameter]
        main = optimizer.optimizer.param_groups[group]["params"][place]
        put(parameter, {"step": optimizer.optimizer.state[main]["step"], **tensors})

    optimizer._set_main_param_and_optimizer_states = put_all


def _count_apart(optimizer: Any) -> None:
    """Give each parameter a count of its own: Megatron-core loads one for all, which then counts every parameter's step."""
    for inner in _adams(optimizer):
        for state in inner.state.values():
            state["step"] = torch.tensor(float(state["step"]))


def _adams(optimizer: Any) -> list[torch.optim.Optimizer]:
    found = [part.optimizer for part in optimizer.chained_optimizers]
    return [inner for inner in found if isinstance(inner, torch.optim.Adam)]
