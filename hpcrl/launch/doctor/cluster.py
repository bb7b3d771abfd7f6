"""Judges the configuration of Slurm for a run: preemption, requeue, limits, signals, accounting."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from hpcrl.config.sections.slurm import SlurmConfig
from hpcrl.launch.doctor.finding import Finding, error, ok, warning

_REQUEUE_WAIT_S = 120
_SHORT_S = 60


def parse_config(text: str) -> dict[str, str]:
    """Return the settings that `scontrol show config` printed; what Slurm calls (null) is the empty text."""
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {name.strip(): "" if value.strip() == "(null)" else value.strip() for name, _, value in pairs}


def parse_records(text: str) -> list[dict[str, str]]:
    """Return the records of `scontrol -o show partition`, one line of NAME=VALUE words each."""
    return [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in text.splitlines() if line]


def seconds(value: str) -> int:
    """Return the number that begins a value such as "30 sec"; 0 where there is none."""
    number = re.match(r"\d+", value)
    return int(number[0]) if number else 0


def minutes(limit: str) -> float:
    """Return a time limit of Slurm, such as "1-12:00:00" or UNLIMITED, in minutes."""
    if limit in ("UNLIMITED", "INFINITE", "NONE", ""):
        return float("inf")
    days, _, clock = limit.rpartition("-")
    hours, mins, secs = (int(part) for part in clock.split(":"))
    return int(days or 0) * 1440 + hours * 60 + mins + secs / 60


def cluster_findings(config: Mapping[str, str], accounting: str | None) -> Iterator[Finding]:
    """Yield findings about all partitions.

    Args:
        config: of `parse_config`.
        accounting: why sacct gives no answer, or None where it does.
    """
    yield ok("slurm", f"{config.get('SLURM_VERSION', 'version unknown')}, cluster {config.get('ClusterName', '')}")
    if accounting is None:
        yield ok("sacct", "answers", "`hpcrl status` asks it about jobs that squeue has forgotten")
    else:
        age = seconds(config.get("MinJobAge", ""))
        yield warning(
            "sacct",
            f"no answer: {accounting}",
            f"nothing to do: hpcrl keeps its own record. A job that leaves none is `lost` to `hpcrl status`, and why is known to "
            f"`scontrol show job` for {age} s (MinJobAge)",
        )
    array = int(config.get("MaxArraySize", "0") or 0)
    yield ok("MaxArraySize", f"{array}", f"a sweep may have {array} runs")
    yield from _signals(config)
    yield _requeue(config)


def _signals(config: Mapping[str, str]) -> Iterator[Finding]:
    plugin = config.get("ProctrackType", "").removeprefix("proctrack/")
    if plugin == "cgroup":
        yield ok("proctrack", plugin, "signals reach the first process of each node alone; hpcrl's agents pass them on")
    elif plugin == "linuxproc":
        yield ok("proctrack", plugin, "signals reach every process of a run; its processes expect that")
    else:
        yield warning(
            "proctrack",
            plugin or "unknown",
            "processes that leave their group may outlive a job here; ask the administrators for proctrack/cgroup",
        )
    wait = seconds(config.get("KillWait", ""))
    text = f"{wait} s lie between TERM and KILL when a job is cancelled, requeued or at its limit"
    yield ok("KillWait", f"{wait} s", text)


def _requeue(config: Mapping[str, str]) -> Finding:
    match = re.search(r"cred_expire=(\d+)", config.get("AuthInfo", ""))
    wait = int(match[1]) if match else _REQUEUE_WAIT_S
    found = f"JobRequeue={config.get('JobRequeue', '?')}, a requeued job waits {wait} s"
    return ok("requeue", found, "hpcrl submits with --requeue, which goes before JobRequeue")


def partition_findings(
    config: Mapping[str, str], partition: Mapping[str, str], time_minutes: int | None, asked: SlurmConfig
) -> Iterator[Finding]:
    """Yield findings about the partition of runs.

    Args:
        partition: a record of `parse_records`.
        time_minutes: slurm.time_minutes, where it is known.
        asked: what runs ask for.
    """
    name, state = partition["PartitionName"], partition.get("State", "UP")
    nodes, limit = partition.get("TotalNodes", "?"), partition.get("MaxTime", "UNLIMITED")
    if state != "UP":
        yield error("partition", f"{name} is {state}", "jobs will wait there; choose another one (slurm.partition)")
    elif time_minutes and time_minutes > minutes(limit):
        remedy = f"such a job waits for ever: set slurm.time_minutes to {minutes(limit):.0f} or less"
        yield error("partition", f"{name}: MaxTime={limit} is less than slurm.time_minutes={time_minutes}", remedy)
    else:
        yield ok("partition", f"{name}: {nodes} nodes, MaxTime={limit}")
    yield _preemption(config, partition)
    yield _others(partition, asked)


def _others(partition: Mapping[str, str], asked: SlurmConfig) -> Finding:
    whole = asked.whole_nodes or "exclusive" in asked.extra or partition.get("OverSubscribe") == "EXCLUSIVE"
    if whole or partition.get("ExclusiveUser") == "YES":
        return ok("other users", "a run shares no node with jobs of others")
    remedy = (
        "they reach the store of torchrun and the ports of gloo and NCCL, which require no secret (docs/security.md). If you do not "
        "trust them, set slurm.exclusive=true or choose a partition with ExclusiveUser=YES"
    )
    return warning("other users", "their jobs may be on the nodes of a run (ExclusiveUser=NO)", remedy)


def _preemption(config: Mapping[str, str], partition: Mapping[str, str]) -> Finding:
    kind, everywhere = config.get("PreemptType", ""), config.get("PreemptMode", "OFF")
    mode = partition.get("PreemptMode", everywhere)
    if kind in ("", "preempt/none") or everywhere == "OFF" or mode == "OFF":
        return ok("preemption", "none: no other job takes the nodes of one in this partition")
    grace, wait = seconds(partition.get("GraceTime", "0")), seconds(config.get("KillWait", ""))
    early = "preempt_send_user_signal" in config.get("SlurmctldParameters", "")
    found = f"{kind.removeprefix('preempt/')}, PreemptMode={mode}, GraceTime={grace} s, KillWait={wait} s"
    if early:
        found += ", preempt_send_user_signal"
    if kind == "preempt/qos":
        found += " (a QOS may say otherwise: `sacctmgr show qos format=name,preemptmode,gracetime`)"
    if "SUSPEND" in mode:
        remedy = (
            "a preempted job stands still and keeps its memory, also that of GPUs; prefer a partition that requeues"
        )
        return warning("preemption", found, remedy)
    if "CANCEL" in mode and grace == 0:
        remedy = (
            "a preempted run ends at once and is not queued again: `hpcrl resume` continues it from its last checkpoint"
        )
        return warning("preemption", found, remedy)
    if grace < _SHORT_S:
        after = (
            "If it is late, it is not queued again: `hpcrl resume` continues it"
            if "CANCEL" in mode
            else "It is queued again in any case"
        )
        remedy = (
            f"a preempted run has {grace or wait} s to save, and may come too late: set trainer.ckpt_interval so that you can spare what "
            f"lies between two checkpoints. {after}"
        )
        return warning("preemption", found, remedy)
    signal = "USR2" if early else "TERM"
    return ok("preemption", found, f"a run gets {signal}, saves, and queues itself again")


def request_findings(slurm: SlurmConfig, scarce_pools: Sequence[str] = ()) -> Iterator[Finding]:
    """Yield doubtful settings of the request to the cluster.

    Args:
        scarce_pools: sections of elastic pools whose elements ask for no cores.
    """
    remedy = "most clusters give such a job one core per node, whatever its GPUs: set it"
    if slurm.scarce_cores:
        found = "slurm.cpus_per_task is not set, and the run takes no whole nodes"
        yield warning("cores", found, f"{remedy}, or slurm.exclusive=true")
    for section in scarce_pools:
        yield warning("cores", f"{section}.cpus_per_task is not set, and an element takes no whole node", remedy)
