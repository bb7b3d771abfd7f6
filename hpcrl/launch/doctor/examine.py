"""Checks this machine, the cluster and a compute node for `hpcrl doctor`."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpcrl.config.sections.slurm import SlurmConfig
from hpcrl.config.validate import build
from hpcrl.errors import ConfigError
from hpcrl.launch.doctor.cluster import (
    cluster_findings,
    parse_config,
    parse_records,
    partition_findings,
    request_findings,
)
from hpcrl.launch.doctor.finding import Finding, error, ok, warning
from hpcrl.launch.doctor.node import facts, place, sandboxes_here
from hpcrl.launch.doctor.node_findings import (
    SUBJECTS,
    Purpose,
    clock_finding,
    environment_findings,
    filesystem_finding,
    findings_of_node,
)
from hpcrl.launch.doctor.node_session import NoAnswerError, NodeSession
from hpcrl.launch.doctor.sandboxes import sandbox_finding
from hpcrl.launch.doctor.shared_fs_probe import VISIBLE_S, link_finding, measure_delays, visibility_finding
from hpcrl.launch.srun import srun
from hpcrl.rundir.layout import OTHER_ROOTS

_ANSWER_S = 60.0
_FACTS_S = 660.0  # torch may take long to import
_BUSY = ("Requested nodes are busy", "Immediate execution impossible")


def examine(root: Path, slurm: Mapping[str, Any], wait_s: int) -> Iterator[Finding]:
    """Yield the findings about this machine, the cluster and a compute node.

    Args:
        root: slurm.root.
        slurm: known settings of the section `slurm`; others have their defaults.
        wait_s: how long to wait for a free compute node.
    """
    asked = build(SlurmConfig, slurm)
    others = {place: Path(other) for name, place in OTHER_ROOTS.items() if (other := getattr(asked, name))}
    directories = dict[str, Path]()
    for name, wanted in {"root": root, **others}.items():
        directories[name] = _existing(wanted)
        yield from _of_root(name, wanted, directories[name])
    directory = directories["root"]
    if shutil.which("scontrol") is None:
        remedy = (
            "only --local works here; for more, run this on a node of the cluster (slurm/devcluster makes a small one)"
        )
        yield warning("slurm", "not on this machine (no scontrol on PATH)", remedy)
        yield from _of_this_machine(directory, asked)
        return
    try:
        config = parse_config(_slurm("scontrol", "show", "config"))
        partitions = parse_records(_slurm("scontrol", "-o", "show", "partition"))
    except NoAnswerError as failure:
        yield error(
            "slurm",
            str(failure),
            "if this machine has no cluster, --local works; else ask the administrators, or wait for slurmctld",
        )
        yield from _of_this_machine(directory, asked)
        return
    yield from cluster_findings(config, _accounting())
    yield from request_findings(asked)
    there = list[SlurmConfig]()
    for name, wanted in _requests(asked):
        partition = _partition(partitions, wanted.partition)
        if partition is None:
            yield _no_partition(name, wanted, partitions)
            continue
        minutes = wanted.time_minutes if name or "time_minutes" in slurm else None
        for finding in partition_findings(config, partition, minutes, wanted):
            yield replace(finding, subject=f"{finding.subject} ({name})") if name else finding
        there.append(replace(wanted, partition=partition["PartitionName"]))
    if there:
        yield from _of_compute_node(directories, there[0], wait_s)
    if asked.sandboxes.nodes:
        yield from _of_sandbox_node(directory, asked, wait_s)


def _requests(asked: SlurmConfig) -> Iterator[tuple[str, SlurmConfig]]:
    """Yield name and settings of each request, and of each partition where one names several; the only request has no name."""
    requests = {name: asked.asked_by(name) for name in asked.requests} or {"": asked}
    for name, one in requests.items():
        for partition in (one.partition or "").split(","):
            yield name, replace(one, partition=partition or None)


def _no_partition(name: str, wanted: SlurmConfig, partitions: Sequence[dict[str, str]]) -> Finding:
    names = ", ".join(one["PartitionName"] for one in partitions)
    found = f"there is no {wanted.partition}" if wanted.partition else "there is no default partition"
    setting = f"slurm.requests.{name}.partition" if name else "--partition, slurm.partition"
    return error(f"partition ({name})" if name else "partition", found, f"choose one of {names} ({setting})")


def _existing(root: Path) -> Path:
    """Return a root, or the nearest directory above it that exists."""
    directory = root.expanduser().absolute()
    while not directory.is_dir():
        directory = directory.parent
    return directory


def _partition(partitions: Sequence[dict[str, str]], wanted: str | None) -> dict[str, str] | None:
    """Return the partition of a name, or the default one where there is no name."""
    fits = (one["PartitionName"] == wanted if wanted else one.get("Default") == "YES" for one in partitions)
    return next((one for one, fit in zip(partitions, fits, strict=True) if fit), None)


def _of_root(name: str, root: Path, directory: Path) -> Iterator[Finding]:
    there = place(directory)
    yield filesystem_finding(name, there, "this machine")
    mode = there["mode"]
    found = f"{directory}: {mode:04o}" + (
        "" if directory == root.expanduser().absolute() else f"; {root} is to be made in it"
    )
    if not there["writable"]:
        return
    if mode & 0o002 and not mode & 0o1000:
        remedy = f"anybody may remove or replace runs there: chmod o-w {directory}"
        yield warning("permissions", found, remedy)
    else:
        yield ok("permissions", found, "run directories are made with 0700")


def _of_this_machine(directory: Path, asked: SlurmConfig) -> Iterator[Finding]:
    here = facts(directory)
    del here["places"]["root"]  # looked at already
    yield from findings_of_node(here, Purpose(named=False))  # without a cluster no other node talks to this one
    if asked.sandboxes.nodes or asked.sandboxes.per_rollout_node:
        yield sandbox_finding(sandboxes_here())


def _slurm(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, timeout=_ANSWER_S)
    except (OSError, subprocess.TimeoutExpired) as failure:
        raise NoAnswerError(f"{command[0]}: {failure}") from None
    if done.returncode != 0:
        raise NoAnswerError("; ".join(done.stderr.strip().splitlines()) or f"{command[0]} failed without a message")
    return done.stdout


def _accounting() -> str | None:
    try:
        _slurm("sacct", "-n", "-X", "-P", "-o", "JobID", "-S", "now")
    except NoAnswerError as failure:
        return str(failure)
    return None


def _of_compute_node(directories: Mapping[str, Path], slurm: SlurmConfig, wait_s: int) -> Iterator[Finding]:
    """Look at a compute node, and whether it shares the directories: slurm.root first, then other roots."""
    token = secrets.token_hex(4)
    probes = {name: directory / f".hpcrl-doctor-{token}-{name}" for name, directory in directories.items()}
    partition, needed = slurm.partition or "", min(1, slurm.gpus)
    gpus = needed > 0 or _has_gpus(partition)
    try:
        if not _made(probes.values()):  # reported already
            return
        with NodeSession(_srun(list(probes.values()), slurm, gpus, wait_s)) as node:
            yield from _findings_of_session(node, probes, wait_s, needed, slurm)
    except NoAnswerError as failure:
        yield _no_node(str(failure), partition, wait_s)
    except ConfigError as failure:
        yield _no_container(failure)
    finally:
        for probe in probes.values():
            shutil.rmtree(probe, ignore_errors=True)


def _of_sandbox_node(directory: Path, asked: SlurmConfig, wait_s: int) -> Iterator[Finding]:
    """Look whether a node of slurm.sandboxes starts a sandbox."""
    own = asked.sandboxes
    partition, account = own.partition or asked.partition, own.account or asked.account
    wanted = replace(asked, partition=partition, account=account, qos=own.qos, constraint=own.constraint)
    try:
        with NodeSession(_srun([directory / "sandboxes"], wanted, gpus=False, wait_s=wait_s)) as node:
            yield sandbox_finding(node.request(wait_s + _FACTS_S, verb="sandboxes"))
    except NoAnswerError as failure:
        yield replace(_no_node(str(failure), partition or "the default partition", wait_s), subject="node of sandboxes")
    except ConfigError as failure:
        yield replace(_no_container(failure), subject="node of sandboxes")


def _made(probes: Iterable[Path]) -> bool:
    try:
        for probe in probes:
            probe.mkdir(mode=0o700)
    except OSError:
        return False
    return True


def _has_gpus(partition: str) -> bool:
    try:
        return "gpu" in _slurm("sinfo", "-h", "-p", partition, "-o", "%G")
    except NoAnswerError:
        return False


def _srun(probes: Sequence[Path], slurm: SlurmConfig, gpus: bool, wait_s: int) -> Sequence[str]:
    job = ["--job-name=hpcrl-doctor", "--nodes=1", "--ntasks=1", "--time=10", f"--immediate={wait_s}", "--unbuffered"]
    seen = sorted({os.path.realpath(probe.parent) for probe in probes})
    return srun(slurm, seen, int(gpus), job, f"-m hpcrl.launch.doctor.node {shlex.quote(str(probes[0]))}")


def _no_node(output: str, partition: str, wait_s: int) -> Finding:
    lines = [line for line in output.splitlines() if "queued and waiting" not in line]
    if any(text in output for text in _BUSY):
        remedy = (
            f"run it again when one is, with a longer --wait, or in another partition; jobs wait in {partition} as well"
        )
        return warning("compute node", f"none was free in {partition} within {wait_s} s", remedy)
    remedy = (
        "an environment and a slurm.root that all nodes see are needed; slurm.setup runs before (FILE.toml as argument)"
    )
    return error("compute node", "; ".join(lines) or output, remedy)


def _no_container(failure: ConfigError) -> Finding:
    found, _, remedy = str(failure).rpartition("; ")
    return error("compute node", found, remedy)


def _findings_of_session(
    node: NodeSession, probes: Mapping[str, Path], wait_s: int, needed: int, slurm: SlurmConfig
) -> Iterator[Finding]:
    node.request(wait_s + _ANSWER_S, verb="clock")  # the first answer takes as long as the start of the job
    before = time.time()
    node_time = node.request(_ANSWER_S, verb="clock")["time"]
    after = time.time()
    probe = probes["root"]
    measured = {
        name: measure_delays(node, probe, VISIBLE_S, "" if name == "root" else str(path))
        for name, path in probes.items()
    }
    there = node.request(_FACTS_S, verb="facts", gpus=str(needed))
    host = there["host"]
    for name, (delays, stranger) in measured.items():
        yield visibility_finding(delays, probes[name].parent, host, SUBJECTS[name])
        if stranger is not None:
            remedy = "the server maps users to others; a run's files must belong to you on all nodes"
            yield error("owner", f"what you write on {host} belongs to user {stranger} here", remedy)
    yield link_finding(probe)
    yield clock_finding(node_time - (before + after) / 2, (after - before) / 2, host)
    yield from environment_findings(facts(probe.parent), there, other=slurm.other_environment)
    there["places"].pop("root", None)  # looked at from here
    yield from findings_of_node(there, Purpose(gpus=needed, requeues=slurm.container.host_python is None))
    if slurm.sandboxes.per_rollout_node:
        yield sandbox_finding(node.request(_FACTS_S, verb="sandboxes"))
