"""Host memory for a rank's state while an engine uses its device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hpcrl.trainer.backends.fsdp.sharding import local


class HostState:
    """Weights and optimizer state of a rank in host memory.

    Each tensor has a host buffer, pinned where the device is a GPU, which is allocated at its first move and kept from then on. Pinning
    takes longer than copying, and an asynchronous checkpoint has to find the same storages again.

    Args:
        device: that the tensors leave and come back to.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._pinned = device, device.type == "cuda"
        self._buffers = dict[tuple[int, str], torch.Tensor]()
        self._models: Sequence[nn.Module] = ()
        self._moments = list[tuple[dict[str, Any], str]]()

    def take(self, models: Sequence[nn.Module], optimizer: torch.optim.Optimizer | None) -> None:
        """Move models, and the state of an optimizer, from the device to host memory."""
        self._models = [model for model in models if self._leaves(next(model.parameters()))]
        for model in self._models:
            owned = {id(parameter) for parameter in model.parameters()}
            model._apply(lambda tensor: self._host(tensor, "") if id(tensor) in owned else tensor.to("cpu"))  # noqa: B023
        for parameter, state in (optimizer.state if optimizer else {}).items():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and self._leaves(value):
                    state[name] = self._host(value, name, parameter)
                    self._moments.append((state, name))
        self._wait()

    def give_back(self) -> None:
        """Move the offloaded state back to the device."""
        for model in self._models:
            model._apply(self._on_device)
        for state, name in self._moments:
            state[name] = self._on_device(state[name])
        self._wait()
        self._models, self._moments = (), []

    def _leaves(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._device.type

    def _host(self, tensor: torch.Tensor, name: str, parameter: torch.Tensor | None = None) -> torch.Tensor:
        held = local(tensor.detach())
        if type(held) is not torch.Tensor or held.untyped_storage().nbytes() != held.nbytes:
            return tensor.to("cpu")  # moments of 8 bits, and what FSDP pads, for which it allocates memory itself
        key = id(tensor if parameter is None else parameter), name
        buffer = self._buffers.get(key)
        if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
            buffer = torch.empty_like(tensor, device="cpu", pin_memory=self._pinned, requires_grad=False)
            self._buffers[key] = buffer
        return buffer.copy_(tensor.detach(), non_blocking=True)

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device, non_blocking=True, copy=True)

    def _wait(self) -> None:
        if self._device.type == "cuda" and (self._models or self._moments):
            torch.cuda.synchronize(self._device)
