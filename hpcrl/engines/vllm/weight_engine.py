"""The weight engine `shared_fs`: loads a published version from the run directory into a running vLLM worker, and reports its digest.

vLLM's workers import it for the class that `--worker-extension-cls` names, before they make their weight engine and their sampler.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler

from hpcrl.data.weight_files import PublishedWeights, WeightReader

if TYPE_CHECKING:
    import torch

_MOST_NAMED = 8


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing has to be agreed beforehand: the transport is the filesystem."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Path of the new weights.

    Attributes:
        path: a committed version, weights/v<k> of the run directory.
    """

    path: str


class SharedFilesystemEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Replaces all weights by those of one version.

    Layers are put back into their checkpoint form before loading and processed again afterwards: CPU and quantised layers are
    repacked at first load and could not be written otherwise.

    Attributes:
        held: version and digest of what was loaded by the last update that was finished; None before the first.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    held: dict[str, Any] | None = None
    _given: dict[str, Any] | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        self.held = self._given = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class then synchronises an accelerator; loading from files is synchronous, and a CPU has none.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        weights = PublishedWeights.read(Path(update_info.path))
        expected = _parameters(self.model)
        given: dict[str, str] = {}
        # all ranks of a node read the same files from its page cache, and each makes the digests of a share of the tensors
        of = self.parallel_config.local_world_size
        index = self.parallel_config.rank % of
        undigested = weights.tensors.keys() - weights.share(index, of).keys()
        with closing(WeightReader(weights.path, list(weights.tensors), undigested, of)) as reader:
            _forget_packed_experts(self.model)
            initialize_layerwise_reload(self.model)
            # those of both forms of the layers: what quantizing adds to the one, such as scales, is in no file
            expected &= _parameters(self.model)
            loaded = cast(Any, self.model).load_weights(_noting(reader, given))
        missing = sorted(expected - (loaded or expected))
        if missing:
            raise ValueError(f"{weights.path} lacks {', '.join(missing[:_MOST_NAMED])}")
        self._given = weights.held(given, index, of)

    def finish_weight_update(self) -> None:
        if self._given is not None:
            finalize_layerwise_reload(self.model, self.model_config)
            _pack_heads(self.model)
        self.held = self._given

    def shutdown(self) -> None:
        pass


def expand_batch_to_tokens(
    values: torch.Tensor, ends: torch.Tensor, tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Return the value of each request, [requests], for each of its draft tokens, [tokens].

    It replaces vLLM 0.31's function of this name for CPUs, which leaves the result uninitialized where values are no int64: temperatures.

    Args:
        ends: [requests], the number of draft tokens up to and with each request.
    """
    counts = ends.diff(prepend=ends.new_zeros(1))
    return values.masked_fill(values == replace_from, replace_to).repeat_interleave(counts, output_size=tokens)


if current_platform.is_cpu():
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
WeightTransferEngineFactory.register_engine("shared_fs", SharedFilesystemEngine)  # as server.py names it


class WeightProof:
    """Extension of vLLM's workers: the proof of their weights."""

    def weight_proof(self) -> dict[str, Any]:
        """Return this rank, how many there are, and what it holds."""
        worker = cast(Any, self)
        return _of_rank(worker) | (worker.weight_transfer_engine.held or {})

    def adapter_proof(self, path: str, number: int) -> dict[str, Any]:
        """Return the proof of an adapter: a digest of its files as this rank reads them.

        Args:
            number: vLLM's.
        """
        worker, weights = cast(Any, self), PublishedWeights.read(Path(path))
        with closing(WeightReader(weights.path)) as reader:
            given = {name: digest for name, _, digest in reader}
        return _of_rank(worker) | (weights.held(given) if number in worker.list_loras() else {})


def _of_rank(worker: Any) -> dict[str, Any]:
    return {"rank": worker.rank, "of": worker.parallel_config.world_size}


def _forget_packed_experts(model: torch.nn.Module) -> None:
    """Repack a mixture's experts for a CPU: vLLM 0.31 packs them only where it makes their kernel, once."""
    for module in model.modules() if current_platform.is_cpu() else ():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            cast(Any, method).moe_kernel = None


def _pack_heads(model: torch.nn.Module) -> None:
    """Repack heads for a CPU: a head that shares the embeddings' weights is not loaded itself, and vLLM 0.31 packs loaded ones."""
    for module in model.modules() if current_platform.is_cpu() else ():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def _parameters(model: torch.nn.Module) -> set[str]:
    """Return the names of a model's parameters as in `load_weights`: without the module in which vLLM keeps a mixture's experts."""
    return {name.replace(".experts.routed_experts.", ".experts.") for name, _ in model.named_parameters()}


def _noting(reader: WeightReader, given: dict[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor, digest in reader:
        if digest:
            given[name] = digest
        yield name, tensor
