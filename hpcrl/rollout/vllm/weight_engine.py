"""The weight engine `shared_fs`: loads a local directory of safetensors files with HF names into a running vLLM worker.

Imported inside vLLM's workers only, by the name that `plugin.register` gives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

if TYPE_CHECKING:
    import torch


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing has to be agreed beforehand: the transport is the filesystem."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Where the new weights are.

    Attributes:
        path: directory on this node that holds the safetensors files.
        version: policy version of these weights.
    """

    path: str
    version: int


class SharedFilesystemEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Replaces all weights by those of one directory.

    Layers are put back into their checkpoint form before loading and processed again afterwards: CPU and quantised layers are
    repacked at first load and could not be written otherwise.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class then synchronises an accelerator; loading from files is synchronous, and a CPU has none.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        expected = {name for name, _ in self.model.named_parameters()}
        loaded = cast(Any, self.model).load_weights(_tensors(Path(update_info.path)))
        missing = sorted(expected - (loaded or expected))
        if missing:
            raise ValueError(
                f"weights of version {update_info.version} in {update_info.path} lack {', '.join(missing[:8])}"
            )

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        pass


def _tensors(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{directory} holds no safetensors file")
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)
