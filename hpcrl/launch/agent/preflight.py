"""Checks the node before anything is loaded on it: the findings of `hpcrl doctor`, with the run's requirements."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hpcrl.config import Config
from hpcrl.config.backend import backend_of
from hpcrl.errors import DeviceError, RunError
from hpcrl.launch.agent.devices import visible_devices
from hpcrl.launch.agent.nsight import records_engines, records_ranks
from hpcrl.launch.agent.start import NodeContext
from hpcrl.launch.doctor.disk_space import Sizes, disk_needs
from hpcrl.launch.doctor.finding import Finding
from hpcrl.launch.doctor.node import facts, gpu_processes
from hpcrl.launch.doctor.node_findings import Purpose, findings_of_node
from hpcrl.launch.nodes import Node
from hpcrl.observe.metrics import values_of
from hpcrl.rundir.checkpoints import Retention, prune
from hpcrl.rundir.evaluations import begun_evaluations
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import require_newest
from hpcrl.rundir.other_roots import require_folders
from hpcrl.runtime.scratch import weight_copy_dir

_LEAVING_S, _POLL_S = 20.0, 2.0
_SHARED = "slurm."


def make_room(run: Run, config: Config, attempt: int) -> None:
    """Delete the checkpoints that need not stay by the settings of this attempt, which may keep fewer than the one before it.

    Raises:
        CommitError: a newer attempt has begun.
    """
    keep = Retention.of(config.trainer)
    try:
        evaluated = begun_evaluations(run)
        scores = values_of(run, keep.metric) if keep.metric else {}
        prune(run, attempt, keep, scores, partial(require_newest, run, attempt), evaluated)
    except OSError as error:
        print(f"older checkpoints could not be deleted: {error}", flush=True)


def check_node(run: Run, config: Config, node: Node, context: NodeContext, sizes: Sizes | None) -> None:
    """Print what is found, and refuse to begin where this node, or the filesystem of the run, lacks what the run needs.

    It takes a second, and on a node with GPUs as long as importing torch in a process of its own.
    """
    profiler, needed = config.trainer.profiler, disk_needs(run, config, sizes)
    if node.ranks or node.index == 0:
        require_folders(run)
    if node.index:  # node 0 deletes old checkpoints meanwhile, and looks then
        needed = {name: replace(need, required=False) for name, need in needed.items()}
    purpose = Purpose(
        gpus=node.gpus,
        compiles=compiling(config, node),
        shares=sharing(config, node),
        nvcc=wanting_nvcc(config, node),
        named=not (context.local or config.slurm.network_interface),
        requeues=node.index == 0 and not context.local and config.slurm.container.host_python is None,
        nsys=records_ranks(profiler, node) or records_engines(profiler, node),
        containers=config.environment.skyrl_gym.agent.container.kind if node.replicas else "none",
        disk_needs=needed,
    )
    findings = list(findings_of_node(_facts(run, node, context, _copies(config, node)), purpose))
    for finding in findings:
        print(f"{finding.level}: {finding.subject}: {_line(finding)}", flush=True)
    errors = [finding for finding in findings if finding.level == "error"]
    if errors:
        shared = all(finding.subject.startswith(_SHARED) for finding in errors)
        raise (RunError if shared else DeviceError)("; ".join(map(_line, errors)))


def compiling(config: Config, node: Node) -> list[str]:
    """Return the engine and the settings that compile kernels on a node."""
    policy, teacher = config.trainer.policy, config.trainer.distillation
    backend = backend_of(config.generator.inference_engine)
    settings = {
        backend.title: backend.compiles and bool(node.replicas or node.engine_parts) and not node.elsewhere,
        "trainer.policy.compile_model": node.ranks > 0 and bool(policy.compile_model),
        "trainer.policy.use_torch_compile": node.ranks > 0 and bool(policy.use_torch_compile),
        "trainer.policy.enable_liger_kernel": node.ranks > 0 and policy.enable_liger_kernel,
        "trainer.policy.low_precision.fp8": node.ranks > 0 and policy.low_precision.fp8,
        "trainer.policy.optimizer_config.moments": node.ranks > 0 and policy.optimizer_config.moments == "8bit",
        "trainer.distillation.compile_model": bool(node.scorers) and teacher.compile_model,
    }
    return [name for name, used in settings.items() if used]


def wanting_nvcc(config: Config, node: Node) -> list[str]:
    """Return the settings whose kernels CUDA's compiler builds on a node with engines."""
    engine, path = config.generator.inference_engine, "generator.inference_engine."
    settings = {
        f"{path}use_flashinfer": engine.use_flashinfer,
        f"{path}quantization": engine.quantization == "fp8_per_block" and os.environ.get("VLLM_USE_DEEP_GEMM") != "0",
    }
    here = bool(node.replicas or node.engine_parts) and not node.elsewhere
    return [name for name, used in settings.items() if used and here]


def sharing(config: Config, node: Node) -> list[str]:
    """Return the settings that have two processes of a node use the same GPU."""
    settings = {
        "trainer.placement.colocate_all": config.trainer.placement.colocate_all and node.ranks > 0,
        "trainer.placement.lend": node.lends,
        "generator.inference_engine.weight_sync_backend": bool(node.replicas)
        and config.generator.inference_engine.weight_sync_backend == "nccl",
    }
    return [name for name, used in settings.items() if used]


def _line(finding: Finding) -> str:
    return f"{finding.found}: {finding.remedy}" if finding.remedy else finding.found


def _copies(config: Config, node: Node) -> Path | None:
    found = weight_copy_dir(config.generator.inference_engine) if node.replicas else None
    try:
        if found:
            found.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DeviceError(f"generator.inference_engine.weight_copy_dir cannot be made: {error}") from error
    return found


def _facts(run: Run, node: Node, context: NodeContext, copies: Path | None) -> dict[str, Any]:
    """Return the facts of this node, once the processes of the job before this one have left its GPUs, or do not leave."""
    devices = visible_devices(node, context.local) if node.gpus else []
    elsewhere = {link.name: place for link, place in run.elsewhere.items()}
    found, deadline = facts(run.path, node.gpus, devices, copies, elsewhere), time.monotonic() + _LEAVING_S
    while found["gpu_processes"] and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        found["gpu_processes"] = gpu_processes(found["gpus"], devices)
    return found
