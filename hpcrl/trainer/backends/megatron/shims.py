"""Megatron-core on a machine without a GPU: CPU replacements of its CUDA calls.

For tests and for trying things. `install` changes torch and Megatron-core for this process and cannot be undone. It is made for one version of
Megatron-core, whose private names it replaces, and refuses any other; and it refuses a machine with CUDA, where all of this is wrong.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from hpcrl.errors import RunError

VERSION = "0.16.1"

_CPU = torch.device("cpu")


def install() -> None:
    """Let Megatron-core run on the CPU, in this process; again without effect."""
    global _mode
    import megatron.core

    require_fitting(cuda=torch.cuda.is_available(), version=megatron.core.__version__)
    if _mode is None:
        _mode = _Redirect()
        _replace_in_torch(_mode)
        _replace_in_megatron()
        _mode.__enter__()


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


class _Redirect(TorchFunctionMode):
    """Redirects Megatron-core's CUDA calls to the CPU where torch lets a mode intercept them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs:  # seldom, and a step makes thousands of calls
            if _is_cuda(kwargs.get("device")):  # device="cuda" stands in schedules, gradient norms, losses
                kwargs = kwargs | {"device": _CPU}
            if kwargs.get("pin_memory"):  # of the token order under context parallelism; the CPU build of torch cannot
                kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
        if func is torch.Tensor.cuda:  # tied embeddings, context parallelism, checkpoints
            return args[0]
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:  # gradients must report a GPU as their device
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs) if kwargs else func(*args)


_mode: _Redirect | None = None


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


def _replace_in_torch(mode: _Redirect) -> None:
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
    autograd: Any = torch.autograd
    run_backward = autograd._engine_run_backward

    def redirected(*args: Any, **kwargs: Any) -> Any:
        with mode:  # recomputation runs layers in there, and torch leaves the mode while it calls `backward`
            return run_backward(*args, **kwargs)

    autograd._engine_run_backward = redirected


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
