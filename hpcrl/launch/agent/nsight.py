"""Builds the command line under which Nsight Systems records a process (https://docs.nvidia.com/nsight-systems/UserGuide).

nsys stands between an agent and a process that it has started. The agent's stop requests still reach a rank, by the process id of its
heartbeat. The agent sees the exit status of nsys, which passes on that of the process.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpcrl.config.sections.profiler import ProfilerConfig
from hpcrl.launch.nodes import Node

PROGRAM = "nsys"
_OPTIONS = (
    "--capture-range=cudaProfilerApi",  # only between cudaProfilerStart and cudaProfilerStop, which the process calls itself
    "--capture-range-end=stop",  # by default the process would be ended too
    "--kill=none",
    "--wait=primary",  # until the process itself ends, whatever it has left behind
    "--trace=cuda,nvtx",
    "--sample=none",  # what needs no rights that clusters do not give
    "--cpuctxsw=none",
    "--trace-fork-before-exec=true",
    "--force-overwrite=true",  # of the same attempt, where its ranks had to be started once more
)


def records_ranks(profiler: ProfilerConfig, node: Node) -> bool:
    """Return whether trainer ranks of this node are started under nsys: all of them, where one is to be recorded."""
    first = node.first_rank
    return profiler.enable_nsys and any(first <= rank < first + node.ranks for rank in profiler.ranks)


def records_engines(profiler: ProfilerConfig, node: Node) -> bool:
    """Return whether the rollout workers of this node, and with them their engines, are started under nsys."""
    return profiler.nsys_engine_iterations > 0 and bool(node.replicas)


def under_nsys(command: Sequence[str], report: Path, *more: str) -> list[str]:
    """Return the command that runs `command` under nsys.

    Args:
        report: the file, <name>.nsys-rep; %q{NAME} in it is what the process has as environment variable NAME.
        more: options of `nsys profile`.
    """
    return [PROGRAM, "profile", *_OPTIONS, *more, f"--output={report.with_suffix('')}", *command]
