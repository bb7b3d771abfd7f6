"""Megatron-core on a machine without a GPU: CPU replacements of its CUDA calls.

For tests and for trying things. `install` changes torch and Megatron-core for this process and cannot be undone. It is made for one version of
Megatron-core, whose private names it replaces, and refuses any other; and it refuses a machine with CUDA, where all of this is wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch.utils._device import _device_constructors

from hpcrl.errors import RunError

VERSION = "0.16.1"

_CPU = torch.device("cpu")
_installed = False


def install() -> None:
    """Let Megatron-core run on the CPU, in this process; again without effect."""
    global _installed
    import megatron.core

    require_fitting(cuda=torch.cuda.is_available(), version=megatron.core.__version__)
    if not _installed:
        _replace_in_torch()
        _replace_in_tensors()
        _replace_in_megatron()
        _installed = True


def require_fitting(*, cuda: bool, version: str) -> None:
    """Raise RunError unless this is the machine, and the version of Megatron-core, that all of this is made for."""
    if cuda:
        raise RunError(
            "this machine has a GPU: Megatron-core runs on it as it is, without hpcrl/trainer/backends/megatron/shims.py"
        )
    if version != VERSION:
        raise RunError(
            f"on a CPU, Megatron-core {VERSION} is needed, found {version}: pip install megatron-core=={VERSION}"
        )


def _on_cpu(create: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a function of torch that creates a tensor, on the CPU where CUDA is named."""

    @wraps(create)
    def created(*args: Any, **kwargs: Any) -> torch.Tensor:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):  # the CPU build of torch cannot
            del kwargs["pin_memory"]
        return create(*args, **kwargs)

    return created


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


class _Stream:
    """The one stream of a CPU: everything on it is done when the call returns."""

    def wait_stream(self, _other: _Stream) -> None: ...

    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None: ...


_STREAM = _Stream()


def _stream(_stream: _Stream) -> AbstractContextManager[None]:
    return nullcontext()


def _replace_in_torch() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: _CPU  # everywhere, as device=torch.cuda.current_device()
    cuda.synchronize = lambda *_: None  # pipelines with micro-batches of different lengths, saving
    # the all-to-all dispatcher of experts copies its counts on a stream of its own
    cuda.Stream = lambda *_, **__: _STREAM
    cuda.current_stream = lambda *_: _STREAM
    cuda.stream = _stream
    # the tracker of random states, and recomputation: what they keep is the state of the CPU's generator
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    _device_constructors()  # torch keeps what a device context changes when it is first asked, which has to be its own functions
    # device="cuda" stands in schedules, gradient norms, losses; pin_memory in the token order under context parallelism
    for create in (torch.empty, torch.ones, torch.tensor, torch.zeros):
        setattr(torch, create.__name__, _on_cpu(create))


def _replace_in_tensors() -> None:
    tensor: Any = torch.Tensor
    type_of = tensor.type
    # tied embeddings, context parallelism, checkpoints
    tensor.cuda = tensor.pin_memory = lambda self, *_, **__: self

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = type_of(self, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found

    tensor.type = type_  # gradients must report a GPU as their device


def _replace_in_megatron() -> None:
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    logging.getLogger(random.__name__).setLevel(
        logging.ERROR
    )  # it warns where the generators are one, as they are here
    names: Any = random
    names._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    # it makes lists for all_to_all out of tensors on a GPU only
    names = token_dispatcher
    names.maybe_move_tensor_to_cpu = _moved


def _moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:  # noqa: ARG001 - Megatron-core's signature
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
