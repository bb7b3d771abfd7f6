"""What a real Slurm 22.05 printed, and what follows from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcrl.config.sections.slurm import SlurmConfig
from hpcrl.launch.doctor.cluster import cluster_findings, minutes, parse_config, parse_records, partition_findings
from hpcrl.launch.doctor.examine import examine
from hpcrl.launch.doctor.node_session import NoAnswerError, NodeSession

CONFIG = """\
Configuration data as of 2026-11-21T19:32:09
AuthInfo                = cred_expire=10
ClusterName             = devcluster
JobRequeue              = 1
KillWait                = 5 sec
MaxArraySize            = 1001
MinJobAge               = 300 sec
PowerPlugin             =
PreemptMode             = REQUEUE
PreemptType             = preempt/partition_prio
ProctrackType           = proctrack/linuxproc
SchedulerParameters     = bf_interval=1,sched_interval=1,sched_min_interval=0,batch_sched_delay=0
SlurmctldHost[0]        = ctl(10.77.0.1)
SlurmctldParameters     = (null)
SLURM_VERSION           = 22.05.8

Slurmctld(primary) at ctl is UP
"""
PARTITIONS = """\
PartitionName=main AllowGroups=ALL AllowAccounts=ALL Default=YES QoS=N/A DefaultTime=NONE GraceTime=20 Hidden=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED Nodes=n[1-2] PreemptMode=REQUEUE State=UP TotalCPUs=16 TotalNodes=2 JobDefaults=(null) TRES=cpu=16,mem=125G,node=2,billing=16
PartitionName=high AllowGroups=ALL AllowAccounts=ALL Default=NO QoS=N/A DefaultTime=NONE GraceTime=0 Hidden=NO MaxNodes=UNLIMITED MaxTime=1-00:00:00 Nodes=n[1-2] PreemptMode=OFF State=UP TotalCPUs=16 TotalNodes=2 JobDefaults=(null) TRES=cpu=16,mem=125G,node=2,billing=16
"""


def test_parsing() -> None:
    config = parse_config(CONFIG)
    assert config["SchedulerParameters"].endswith("batch_sched_delay=0")
    assert (config["SlurmctldParameters"], config["PowerPlugin"], config["KillWait"]) == ("", "", "5 sec")
    main, high = parse_records(PARTITIONS)
    assert (main["PartitionName"], main["TRES"]) == ("main", "cpu=16,mem=125G,node=2,billing=16")
    assert minutes(high["MaxTime"]) == 1440
    assert minutes("02:30:30") == 150.5
    assert minutes(main["MaxTime"]) == float("inf")


def test_what_holds_in_the_whole_cluster() -> None:
    found = {one.subject: one for one in cluster_findings(parse_config(CONFIG), "Slurm accounting storage is disabled")}
    assert {name: one.level for name, one in found.items() if one.level != "ok"} == {"sacct": "warning"}
    assert "300 s (MinJobAge)" in found["sacct"].remedy
    assert "1001 runs" in found["MaxArraySize"].remedy
    assert "every process" in found["proctrack"].remedy
    assert "waits 10 s" in found["requeue"].found
    other = parse_config(CONFIG.replace("cred_expire=10", "(null)").replace("linuxproc", "pgid"))
    found = {one.subject: one for one in cluster_findings(other, None)}
    assert "waits 120 s" in found["requeue"].found
    assert (found["proctrack"].level, found["sacct"].level) == ("warning", "ok")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ((), ("warning", "20 s to save")),
        ((), ("warning", "queued again in any case")),
        (("PreemptMode=REQUEUE", "PreemptMode=CANCEL"), ("warning", "If it is late, it is not queued again")),
        (("GraceTime=20", "GraceTime=0"), ("warning", "5 s to save")),
        (("GraceTime=20", "GraceTime=120"), ("ok", "gets TERM, saves, and queues itself again")),
        (("PreemptMode=REQUEUE", "PreemptMode=OFF"), ("ok", "")),
        (("PreemptMode=REQUEUE", "PreemptMode=GANG,SUSPEND"), ("warning", "keeps its memory")),
        (("GraceTime=20", "GraceTime=0", "PreemptMode=REQUEUE", "PreemptMode=CANCEL"), ("warning", "hpcrl resume")),
    ],
)
def test_preemption(change: tuple[str, ...], expected: tuple[str, str]) -> None:
    text = PARTITIONS
    for old, new in zip(change[::2], change[1::2], strict=True):
        text = text.replace(old, new)
    preemption = list(partition_findings(parse_config(CONFIG), parse_records(text)[0], None, SlurmConfig()))[-2]
    assert preemption.level == expected[0]
    assert expected[1] in preemption.remedy


def test_preemption_where_the_user_signal_comes_first_or_there_is_none() -> None:
    partition = parse_records(PARTITIONS.replace("GraceTime=20", "GraceTime=120"))[0]
    early = parse_config(CONFIG.replace("Parameters     = (null)", "Parameters     = preempt_send_user_signal"))
    assert "gets USR2" in list(partition_findings(early, partition, None, SlurmConfig()))[-2].remedy
    never = parse_config(CONFIG.replace("preempt/partition_prio", "preempt/none"))
    assert "none: no other job" in list(partition_findings(never, partition, None, SlurmConfig()))[-2].found


def test_partition_that_takes_no_such_job() -> None:
    high = parse_records(PARTITIONS)[1]
    too_long = next(iter(partition_findings(parse_config(CONFIG), high, 2000, SlurmConfig())))
    assert (too_long.level, "1440 or less" in too_long.remedy) == ("error", True)
    down = next(iter(partition_findings(parse_config(CONFIG), {**high, "State": "DRAIN"}, 60, SlurmConfig())))
    assert (down.level, "DRAIN" in down.found) == ("error", True)


@pytest.mark.parametrize(
    ("partition", "asked", "alone"),
    [
        ({}, {}, False),
        ({"ExclusiveUser": "NO", "OverSubscribe": "NO"}, {}, False),
        ({"ExclusiveUser": "YES"}, {}, True),
        ({"OverSubscribe": "EXCLUSIVE"}, {}, True),
        ({}, {"exclusive": True}, True),
        ({}, {"gpus_per_node": 8}, True),
        ({}, {"gpus_per_node": 8, "cpus_per_task": 16}, False),
        ({}, {"extra": {"exclusive": "user"}}, True),
    ],
)
def test_whether_others_may_be_on_a_runs_nodes(partition: dict[str, str], asked: dict[str, Any], alone: bool) -> None:
    main = parse_records(PARTITIONS)[0] | partition
    last = list(partition_findings(parse_config(CONFIG), main, None, SlurmConfig(**asked)))[-1]
    assert last.subject == "other users"
    assert (last.level == "ok") == alone
    assert alone or "slurm.exclusive=true" in last.remedy


def test_a_program_of_slurm_that_is_not_there_is_silent() -> None:
    with pytest.raises(NoAnswerError, match="no-srun: No such file or directory"):
        NodeSession(["no-srun", "--nodes=1"])


def test_a_root_that_a_container_cannot_be_given_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the others, which an error would keep from --json."""
    root = tmp_path / "a,b"
    root.mkdir()
    answers = {"scontrol": f"case $2 in config) cat <<'END'\n{CONFIG}\nEND\n;; *) cat <<'END'\n{PARTITIONS}\nEND\nesac"}
    for name, program in (answers | dict.fromkeys(["sacct", "sinfo", "srun"], "exit 1")).items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    slurm = {"container": {"kind": "apptainer", "image": "/h.sif"}, "sandboxes": {"nodes": 1}}
    errors = [finding for finding in examine(root, slurm, 1) if finding.level == "error"]
    assert [(one.subject, one.remedy) for one in errors] == [
        (subject, "rename it, or use another") for subject in ("compute node", "node of sandboxes")
    ]
    assert all(one.found.startswith(f"{root}: ") for one in errors)
    assert list(root.iterdir()) == []
