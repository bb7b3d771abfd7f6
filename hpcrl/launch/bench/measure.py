"""Starts jobs/bench.py on the nodes, through the queue, or on this machine, and waits for it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from contextlib import ExitStack

from hpcrl.config import Config
from hpcrl.errors import RunError
from hpcrl.launch.bench.folder import Bench, Nodes, read_nodes
from hpcrl.launch.container import seen_by
from hpcrl.launch.local.foreground import job
from hpcrl.launch.srun import srun
from hpcrl.launch.submit.submit import code_sources

_LOOK_S = 0.2
_MINUTES = 30
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
    ranks = each if local else nodes * each
    if not slurm.gpus:
        ranks = max(2, ranks)  # what one process alone sees of a filesystem is its own cache
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
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
            while None in (statuses := [process.poll() for process in processes]) and not any(statuses):
                time.sleep(_LOOK_S)  # where one fails, the others wait for it
        finally:
            for process in processes:
                process.terminate()
    found = read_nodes(bench)
    if any(statuses) or found is None:
        end = bench.log.read_text(errors="replace")[-_TAIL:].strip()
        raise RunError(f"the nodes could not be measured (log: {bench.log}): {end}")
    return found


def _here(bench: Bench, rank: int, ranks: int) -> tuple[dict[str, str], list[str]]:
    package = str(code_sources()["hpcrl"].parent)
    paths = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    own = {"PYTHONPATH": paths, "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    return own, [sys.executable, str(job("bench")), str(bench.path)]


def _in_queue(bench: Bench, config: Config, nodes: int, each: int) -> list[str]:
    slurm = config.slurm
    options = [
        "--job-name=hpcrl-bench",
        f"--nodes={nodes}",
        f"--ntasks-per-node={each}",
        f"--time={min(_MINUTES, slurm.time_minutes)}",  # a partition may allow no more than the run asks for
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
    return srun(
        slurm, seen, slurm.gpus_per_node, options, f"-m hpcrl.launch.bench.start {shlex.quote(str(bench.path))}"
    )
