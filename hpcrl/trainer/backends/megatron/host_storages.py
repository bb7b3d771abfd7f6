"""Host memory for a rank's Megatron-core state while an engine uses its device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel


@dataclass(frozen=True)
class _Copy:
    """A storage of the device, and host memory of its size."""

    storage: torch.UntypedStorage
    host: torch.Tensor

    @property
    def on_device(self) -> torch.Tensor:
        """All bytes of the storage."""
        return torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)


class HostStorages:
    """Tensors of a rank in host memory, storage by storage.

    Parameters are views of Megatron-core's buffers; its buckets, its optimizer and its collectives have further views of the same storages.
    Those stay what they are: the storages lose their memory, and get it back. The tensors that are read meanwhile become views of host
    memory. A storage gets that at its first move and keeps it, pinned where the device is a GPU.

    Attributes:
        away: whether the tensors are in host memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._pinned = device, device.type == "cuda"
        self._copies = dict[int, _Copy]()
        self._moved = list[tuple[torch.Tensor, torch.Tensor]]()
        self._emptied = list[tuple[torch.Tensor, int]]()
        self.away = False

    def take(
        self, tensors: Iterable[torch.Tensor], views: Iterable[torch.Tensor], emptied: Iterable[torch.Tensor]
    ) -> None:
        """Move tensors from the device to host memory. Tensors of subclasses, such as TransformerEngine's of 8 bits, stay.

        Args:
            views: tensors that move where their storage does.
            emptied: tensors, each all of its storage, which loses its memory, and is zero when it gets it back.
        """
        moving, known = {id(each): each for each in tensors if self._leaves(each)}, self._copies
        storages = {_key(each): each.untyped_storage() for each in moving.values()}
        self._copies = {key: known.get(key) or self._made(storage) for key, storage in storages.items()}
        for copy in self._copies.values():
            copy.host.copy_(copy.on_device, non_blocking=True)
        self._wait()
        moving |= {id(each): each for each in views if self._leaves(each) and _key(each) in storages}
        for tensor in moving.values():
            self._moved.append((tensor, tensor.data))
            host = self._copies[_key(tensor)].host.untyped_storage()
            place = tensor.storage_offset(), tensor.size(), tensor.stride()
            tensor.data = torch.empty(0, dtype=tensor.dtype).set_(host, *place)
        self._emptied = [(each, each.untyped_storage().nbytes()) for each in emptied]
        for storage in (*storages.values(), *(each.untyped_storage() for each, _ in self._emptied)):
            storage.resize_(0)
        self.away = True

    def give_back(self) -> None:
        """Move the tensors back to the device, which they have left."""
        for copy in self._copies.values():
            copy.storage.resize_(copy.host.nbytes)
            copy.on_device.copy_(copy.host, non_blocking=True)
        for tensor, before in self._moved:
            tensor.data = before
        for each, size in self._emptied:
            each.untyped_storage().resize_(size)
            each.zero_()
        self._wait()
        self._moved, self._emptied, self.away = [], [], False

    def _leaves(self, tensor: torch.Tensor) -> bool:
        return type(tensor.data) is torch.Tensor and tensor.device.type == self._device.type

    def _made(self, storage: torch.UntypedStorage) -> _Copy:
        return _Copy(storage, torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=self._pinned))

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _key(tensor: torch.Tensor) -> int:
    storage: Any = tensor.untyped_storage()
    return storage._cdata


def hook_gradients(chunk: DistributedDataParallel) -> None:
    """Register Megatron-core's hooks of gradients, as it does itself (0.16.1), where torch has replaced what they are on.

    That is the accumulator of a parameter's gradient, which torch drops when the parameter's data changes its device.
    """
    hooked, chunk.grad_accs = {id(each): each for each in chunk.grad_accs}, []
    for parameter in chunk.module.parameters():
        later = chunk.ddp_config.delay_wgrad_compute and getattr(parameter, "skip_backward_post_hook", False)
        if parameter.requires_grad and not later:
            function: Any = parameter.expand_as(parameter).grad_fn
            accumulator = function.next_functions[0][0]
            if id(accumulator) not in hooked:
                accumulator.register_hook(chunk._make_backward_post_hook(parameter))
            chunk.grad_accs.append(accumulator)
