"""Reports this node's GPUs by torch, and whether each of them computes, as JSON. A process of its own, because the import may take long,
or crash.

python -m hpcrl.launch.doctor.torch_facts
"""

from __future__ import annotations

import json
import time
from typing import Any

_SIZE, _LARGE, _ROUNDS = 1024, 8192, 10


def torch_facts() -> dict[str, Any]:
    """Return version, CUDA, NCCL, the number of devices, and of each that there is what `multiply` finds."""
    import torch
    from torch.cuda import nccl

    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    version = ".".join(map(str, nccl.version())) if devices else None
    found = [multiply(torch.device("cuda", index)) for index in range(devices)]
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": version,
        "devices": devices,
        "matmul": found,
    }


def multiply(device: Any) -> dict[str, Any]:
    """Multiply matrices on a device in bfloat16, with a known result: small integers, whose sums float32 holds exactly.

    Returns:
        right: whether the result is that of the CPU, bit by bit. error: the exception instead of a result. tflops: speed of a larger product,
        0 on a CPU, where nothing is measured.
    """
    import torch

    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randint(-4, 5, (_SIZE, _SIZE), generator=generator).float() for _ in range(2))
    expected = (left @ right).bfloat16()
    try:
        result = left.to(device, torch.bfloat16) @ right.to(device, torch.bfloat16)
        return {"right": torch.equal(result.cpu(), expected), "tflops": _speed(device)}
    except RuntimeError as error:  # CUDA's own, out of memory included
        return {"right": False, "tflops": 0.0, "error": str(error).strip().splitlines()[0]}


def _speed(device: Any) -> float:
    import torch

    if device.type != "cuda":
        return 0.0
    matrix = torch.ones((_LARGE, _LARGE), device=device, dtype=torch.bfloat16)
    torch.mm(matrix, matrix)  # the first one sets up cuBLAS
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(_ROUNDS):
        torch.mm(matrix, matrix)
    torch.cuda.synchronize(device)
    return 2 * _LARGE**3 * _ROUNDS / (time.perf_counter() - began) / 1e12


if __name__ == "__main__":
    print(json.dumps(torch_facts()))
