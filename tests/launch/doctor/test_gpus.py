"""What is said of GPUs, of which the machine of these tests has none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hpcrl.launch.doctor import torch_facts
from hpcrl.launch.doctor.gpus import gpu_findings

RIGHT = {"right": True, "tflops": 700.0}
WELL: dict[str, Any] = {
    "host": "n1", "gpus": [{"index": "0", "uuid": "GPU-1", "name": "NVIDIA H200", "driver": "570.1", "memory": "143771 MiB", "compute_mode": "Default"}],
    "listed": "4,5", "devices": ["4", "5"], "gpu_processes": [], "compiler": "/usr/bin/gcc",
    "nvcc": None, "flashinfer_cubin": False, "numa": {"nodes": 2, "numactl": "/usr/bin/numactl"},
    "python_header": {"path": "/usr/include/python3.11/Python.h", "there": True},
    "torch": {"version": "2.13.0", "cuda": "13.0", "devices": 2, "nccl": "2.29.7", "matmul": [RIGHT, RIGHT]},
}  # fmt: skip


def levels(
    needed: int = 2,
    compiles: Sequence[str] = ("vLLM",),
    shares: Sequence[str] = (),
    nvcc: Sequence[str] = (),
    **changes: Any,
) -> dict[str, str]:
    return {one.subject: one.level for one in gpu_findings({**WELL, **changes}, needed, compiles, shares, nvcc)}


def with_torch(**changes: Any) -> dict[str, Any]:
    return {**WELL["torch"], **changes}


def process(memory: int | None) -> dict[str, Any]:
    return {"gpu": "4", "pid": 77, "name": "python3", "user": "eve", "memory": memory}


def test_gpus_of_a_healthy_node() -> None:
    assert levels() == {"GPU": "ok", "matrix product": "ok", "compiler": "ok"}
    assert levels(compiles=()) == {"GPU": "ok", "matrix product": "ok"}


def test_gpus_that_cannot_be_used() -> None:
    assert levels(needed=3) == {"GPU": "error"}
    assert levels(torch=with_torch(cuda=None, devices=0)) == {"GPU": "error"}
    assert levels(torch=with_torch(devices=1)) == {"GPU": "error"}
    assert levels(torch={"error": "No module named torch"}) == {"GPU": "error"}
    assert levels(torch=None, gpus=[]) == {"GPU": "warning"}
    assert levels(torch=None, gpus=[], devices=[]) == {"GPU": "ok"}


def test_a_gpu_that_computes_wrongly_or_slowly() -> None:
    found = {
        one.subject: one
        for one in gpu_findings(
            {**WELL, "torch": with_torch(matmul=[RIGHT, {"right": False, "tflops": 1.0}])}, 2, ["vLLM"]
        )
    }
    assert found["matrix product"].level == "error"
    assert "device 5: a wrong result" in found["matrix product"].found
    failed = {"right": False, "tflops": 0.0, "error": "CUDA error: uncorrectable ECC error encountered"}
    found = {
        one.subject: one for one in gpu_findings({**WELL, "torch": with_torch(matmul=[failed, RIGHT])}, 2, ["vLLM"])
    }
    assert "device 4: CUDA error: uncorrectable ECC" in found["matrix product"].found
    assert levels(torch=with_torch(matmul=[RIGHT, {"right": True, "tflops": 300.0}]))["matrix product"] == "warning"


def test_processes_on_them() -> None:
    assert levels(gpu_processes=[process(30156)])["GPU processes"] == "error"
    assert levels(gpu_processes=[process(600), process(600)])["GPU processes"] == "error"
    assert levels(gpu_processes=[process(30)])["GPU processes"] == "warning"
    assert levels(gpu_processes=[process(None)])["GPU processes"] == "warning"
    found = {one.subject: one.found for one in gpu_findings({**WELL, "gpu_processes": [process(30156)]}, 2, ["vLLM"])}
    assert found["GPU processes"] == "GPU 4 of n1 is used by 77 python3 of eve (30156 MiB)"


def test_what_triton_needs() -> None:
    assert levels(compiler=None)["compiler"] == "error"
    header = {"path": "/usr/include/python3.11/Python.h", "there": False}
    found = {one.subject: one for one in gpu_findings({**WELL, "python_header": header}, 2, ["vLLM"])}
    assert found["compiler"].level == "error"
    assert "no /usr/include/python3.11/Python.h on n1" in found["compiler"].found


def test_what_cudas_compiler_builds() -> None:
    flashinfer, blocks = "generator.inference_engine.use_flashinfer", "generator.inference_engine.quantization"
    assert levels(nvcc=[flashinfer])["nvcc"] == "error"
    assert levels(nvcc=[blocks])["nvcc"] == "warning"
    there = list(gpu_findings({**WELL, "nvcc": "/usr/local/cuda/bin/nvcc"}, 2, (), (), [flashinfer, blocks]))
    assert "nvcc" not in {one.subject for one in there}
    assert "nvcc" not in levels(nvcc=[flashinfer], flashinfer_cubin=True), "its kernels are there"


def test_nodes_of_a_machine_to_which_nothing_can_be_bound() -> None:
    assert levels(numa={"nodes": 2, "numactl": None})["NUMA"] == "warning"
    assert "NUMA" not in levels(numa={"nodes": 1, "numactl": None})
    assert "NUMA" not in levels(needed=1, numa={"nodes": 2, "numactl": None})


def test_parts_of_a_gpu() -> None:
    two = ["MIG-1f3c", "MIG-77ab"]
    (found,) = gpu_findings({**WELL, "devices": two, "torch": with_torch(devices=1)}, 2, ["vLLM"])
    assert (found.subject, found.level) == ("GPU", "error")
    assert "a process sees one of them" in found.found
    assert levels(needed=1, devices=two[:1], torch=with_torch(devices=1, matmul=[RIGHT]))["GPU"] == "ok"


def test_gpus_that_one_process_alone_may_use() -> None:
    def mode(name: str) -> dict[str, Any]:
        return {"gpus": [{**WELL["gpus"][0], "compute_mode": name}]}

    assert "compute mode" not in levels(**mode("Exclusive_Process"))
    assert levels(**mode("Prohibited"))["compute mode"] == "error"
    shares = ["trainer.placement.colocate_all"]
    assert levels(shares=shares, **mode("Exclusive_Process"))["compute mode"] == "error"
    assert "compute mode" not in levels(shares=shares)
    (found,) = [
        one
        for one in gpu_findings({**WELL, **mode("Exclusive_Process")}, 2, (), shares)
        if one.subject == "compute mode"
    ]
    assert found.found == (
        "Exclusive_Process on n1, and trainer.placement.colocate_all has two processes use the same GPU"
    )


def test_a_matrix_product_that_is_known() -> None:
    """On the CPU: what a GPU computes is compared with this."""
    assert torch_facts.multiply(torch.device("cpu")) == {"right": True, "tflops": 0.0}
    assert torch_facts.multiply(torch.device("meta"))["right"] is False
