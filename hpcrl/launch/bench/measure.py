"""Starts jobs/bench.py on the nodes, through the queue, or on this machine, and waits for it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from contextlib import ExitStack

from hpcrl.config import Config
from hpcrl.errors import RunError
from hpcrl.launch.bench.folder import Bench, Nodes, read_nodes
from hpcrl.launch.container import seen_by
from hpcrl.launch.local.foreground import job
from hpcrl.launch.srun import srun
from hpcrl.launch.submit.submit import code_sources

_LIMIT_S = 1800.0
_TAIL = 2000


def measure_nodes(bench: Bench, config: Config, nodes: int, *, local: bool) -> Nodes:
    """Return what the processes on the nodes measured.

    Args:
        nodes: that are asked for.
        local: start them on this machine.

    Raises:
        RunError: they failed, with the end of their output.
    """
    slurm = config.slurm
    each = max(1, slurm.gpus)
    ranks = (
        nodes * each if slurm.gpus or nodes > 1 else 2
    )  # what one process alone sees of a filesystem is its own cache
    if local:
        ranks = each if slurm.gpus else max(2, nodes)
    package = str(code_sources()["hpcrl"].parent)
    paths = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
    with bench.log.open("wb") as log, ExitStack() as started:
        if local:
            commands = [_here(bench, rank, ranks) for rank in range(ranks)]
        else:
            commands = [({}, _in_queue(bench, config, nodes, ranks // nodes))]
        processes = [
            started.enter_context(
                subprocess.Popen(command, env=environment | own, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            )
            for own, command in commands
        ]
        try:
            statuses = [process.wait(_LIMIT_S if local else None) for process in processes]
        finally:
            for process in processes:
                process.terminate()
    found = read_nodes(bench)
    if any(statuses) or found is None:
        end = bench.log.read_text(errors="replace")[-_TAIL:].strip()
        raise RunError(f"the nodes could not be measured (log: {bench.log}): {end}")
    return found


def _here(bench: Bench, rank: int, ranks: int) -> tuple[dict[str, str], list[str]]:
    own = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    return own, [sys.executable, str(job("bench")), str(bench.path)]


def _in_queue(bench: Bench, config: Config, nodes: int, each: int) -> list[str]:
    slurm = config.slurm
    options = [
        "--job-name=hpcrl-bench",
        f"--nodes={nodes}",
        f"--ntasks-per-node={each}",
        "--time=30",
        "--kill-on-bad-exit=1",
    ]
    if slurm.whole_nodes:
        options += ["--exclusive", "--mem=0", "--cpu-bind=none"]
    if slurm.mem_gb is not None:
        options.append(f"--mem={slurm.mem_gb}G" if slurm.mem_gb else "--mem=0")
    if slurm.cpus_per_task is not None:
        options.append(f"--cpus-per-task={max(1, slurm.cpus_per_task // each)}")
    options += [f"--{name}" if value is True else f"--{name}={value}" for name, value in slurm.extra.items()]
    seen = seen_by(bench.path.parents[2], [config])
    started = srun(
        slurm, seen, slurm.gpus_per_node, options, f"{shlex.quote(str(job('bench')))} {shlex.quote(str(bench.path))}"
    )
    exports = "export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID\n"
    return [*started[:-1], exports + started[-1]]
