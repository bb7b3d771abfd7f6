"""Paths and records of a bench: a run, and a folder beside it, <root>/.bench/<project>/<run>. Without a config.toml it is no run.

config.toml    the configuration of the run; model/ and prompts.jsonl, where it names them
meeting.json   where the processes of jobs/bench.py meet
nodes.json     what they measured, as `Nodes`; probe-0/ and the like, files that they measure with
plan.json      memory of a trainer rank as `hpcrl plan` estimates it
kills.json     the processes that were killed, as a list of `Kill`
nodes.log      output of jobs/bench.py; engine.log of the engine that it measures, secrets/token which that one is asked with
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hpcrl.errors import RunError
from hpcrl.rundir.commit import discard
from hpcrl.rundir.layout import Run
from hpcrl.rundir.records import as_record, damaged, read_object

PROJECT = "bench"
_REMEDY = "run `hpcrl bench` again"


@dataclass(frozen=True)
class Bench:
    """The folder of a bench.

    Attributes:
        path: its absolute path.
    """

    path: Path

    @classmethod
    def of(cls, run: Run) -> Bench:
        """Return the folder of a run that `hpcrl bench` made. Raises RunError where there is none."""
        found = cls(run.bench)
        if not found.config.is_file():
            raise RunError(f"{run.name} is no run of hpcrl bench: there is no {found.config}")
        return found

    @property
    def config(self) -> Path:
        return self.path / "bench.toml"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def prompts(self) -> Path:
        return self.path / "prompts.jsonl"

    @property
    def meeting(self) -> Path:
        return self.path / "meeting.json"

    @property
    def nodes(self) -> Path:
        return self.path / "nodes.json"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def kills(self) -> Path:
        return self.path / "kills.json"

    @property
    def log(self) -> Path:
        return self.path / "nodes.log"

    @property
    def engine_log(self) -> Path:
        return self.path / "engine.log"

    def probe(self, number: int) -> Path:
        return self.path / f"probe-{number}"

    def clear(self) -> None:
        """Remove the large files of a bench that gets no run; the log stays."""
        for folder in (self.model, *self.path.glob("probe-*")):
            discard(folder)


@dataclass(frozen=True)
class Nodes:
    """What the processes on the nodes measured.

    Attributes:
        device: name of the GPU, or of the processor.
        bus_bandwidth: of an all-reduce over all ranks, in GB/s.
        tflops: of a matrix product in bfloat16 on the slowest device; 0 without GPUs.
        wrong: what was wrong with the results of matrix products.
        written_bytes: that all nodes together wrote in `write_seconds`, and read in `read_seconds`.
        operations: on files, of all nodes together, in `operation_seconds`.
        sync_seconds: median of the slowest node until a small file is on the disk.
        seen_seconds: until another node saw a file, new or replaced, whichever took longer.
        tokens_per_second, mfu: of training, by the tokens of a sample; without MFU where the device's peak is not known.
        generated_per_second: tokens of one replica, by the tokens of a prompt and a completion, as in "64_1024".
        reads, torn: of a file while it was replaced, and those of them that had parts of two files.
    """

    hosts: list[str]
    ranks: int
    device: str
    bus_bandwidth: float
    tflops: float
    wrong: list[str]
    written_bytes: int
    write_seconds: float
    read_seconds: float
    operations: int
    operation_seconds: float
    sync_seconds: float
    seen_seconds: float
    reads: int
    torn: int
    tokens_per_second: dict[str, float]
    mfu: dict[str, float]
    generated_per_second: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Kill:
    """A process that the bench killed.

    Attributes:
        time: Unix time at the clock of its node.
        step: last step that had been trained then.
    """

    role: str
    process: str
    attempt: int
    time: float
    step: int


@dataclass(frozen=True)
class Planned:
    """Estimate of `hpcrl plan`.

    Attributes:
        rank_bytes: memory of a trainer rank; 0: not known.
        note: what it leaves out, or why it is not known.
    """

    rank_bytes: int
    note: str


def read_nodes(bench: Bench) -> Nodes | None:
    """Return what was measured on the nodes; None: nothing yet. Raises RunError where the file is damaged."""
    value = read_object(bench.nodes, _REMEDY)
    return None if value is None else as_record(Nodes, value, bench.nodes, _REMEDY)


def read_kills(bench: Bench) -> list[Kill]:
    """Return the kills, in their order. Raises RunError where the file is damaged."""
    value = read_object(bench.kills, _REMEDY) or {"kills": []}
    if not isinstance(kills := value.get("kills"), list):
        raise damaged(bench.kills, "it has no list of kills", _REMEDY)
    return [as_record(Kill, each, bench.kills, _REMEDY) for each in kills]


def read_plan(bench: Bench) -> Planned:
    """Return what `hpcrl plan` estimated. Raises RunError where the file is damaged."""
    value = read_object(bench.plan, _REMEDY)
    return Planned(0, "the bench ended before") if value is None else as_record(Planned, value, bench.plan, _REMEDY)
