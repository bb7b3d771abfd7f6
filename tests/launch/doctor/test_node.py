"""The part on the node, as a real process, and what is said of its facts."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hpcrl import faults as fault
from hpcrl.launch.doctor.disk_space import DiskNeed
from hpcrl.launch.doctor.node import facts, filesystem
from hpcrl.launch.doctor.node_findings import (
    Purpose,
    clock_finding,
    environment_findings,
    filesystem_finding,
    findings_of_node,
)
from hpcrl.launch.doctor.node_session import NoAnswerError, NodeSession
from hpcrl.launch.doctor.sandboxes import sandbox_finding
from hpcrl.launch.doctor.shared_fs_probe import link_finding, measure_delays, visibility_finding
from hpcrl.sandboxes.inside import FUSE, OVERLAY, PROC, TMPFS, USER_NAMESPACES
from hpcrl.sandboxes.sandbox import ORDINARY_USER

MOUNTS = """\
22 1 259:1 / / rw,relatime - ext4 /dev/root rw
30 22 0:25 / /dev/shm rw,nosuid - tmpfs tmpfs rw
41 22 0:44 / /home rw shared:5 - nfs4 server:/home rw,vers=4.2
42 41 0:45 / /home/my\\040data rw - lustre 10.0.0.1@o2ib:/fs rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/usr/x", "ext4"),
        ("/home/a", "nfs4"),
        ("/homes", "ext4"),
        ("/home/my data/runs", "lustre"),
        ("/dev/shm", "tmpfs"),
    ],
)
def test_filesystem_of_a_path(path: str, kind: str) -> None:
    assert filesystem(Path(path), MOUNTS) == kind


def node(directory: Path) -> NodeSession:
    return NodeSession([sys.executable, "-m", "hpcrl.launch.doctor.node", str(directory)])


def test_files_are_seen_both_ways(tmp_path: Path) -> None:
    with node(tmp_path) as there:
        delays, stranger = measure_delays(there, tmp_path, 10)
    assert stranger is None
    assert set(delays) == {"new there", "replaced there", "new here", "replaced here"}
    assert all(delay is not None and delay < 5 for delay in delays.values())
    assert visibility_finding(delays, tmp_path, "n1").level == "ok"
    assert visibility_finding({**delays, "replaced there": 8.0}, tmp_path, "n1").level == "warning"


def test_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "probe").mkdir()
    assert link_finding(tmp_path / "probe").level == "ok"
    monkeypatch.setattr(fault, "_passed", fault.Counter())
    monkeypatch.setenv("HPCRL_FAULT", "link:raise=EPERM")
    without = link_finding(tmp_path / "probe")
    assert (without.level, without.found) == ("warning", f"{tmp_path}: none (Operation not permitted)")


def test_directory_that_is_another_one_there(tmp_path: Path) -> None:
    here, other = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    other.mkdir()
    with node(other) as there:
        delays, _ = measure_delays(there, here, 0.5)
    finding = visibility_finding(delays, here, "n1")
    assert (finding.level, "a new file is not seen on n1" in finding.found) == ("error", True)
    assert "all nodes share" in finding.remedy


def test_another_root_that_the_node_does_not_share(tmp_path: Path) -> None:
    root, other = tmp_path / "root", tmp_path / "other"
    root.mkdir()
    other.mkdir()
    with node(root) as there:
        delays, _ = measure_delays(there, root, 10, str(other))
        assert visibility_finding(delays, other, "n1", "slurm.checkpoint_root").level == "ok"
        assert sorted(path.name for path in other.iterdir()) == ["from-here", "from-there"]
    assert list(root.iterdir()) == []
    remedy = visibility_finding({"new there": None}, other, "n1", "slurm.checkpoint_root").remedy
    assert remedy == "slurm.checkpoint_root must lie on a filesystem that all nodes share"


def test_directory_that_is_missing_there(tmp_path: Path) -> None:
    with node(tmp_path / "missing") as there:
        delays, _ = measure_delays(there, tmp_path, 0.5)
    assert delays == {"new there": None}


def test_command_that_fails_is_quoted_and_one_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcrl.launch.doctor.node_session._LEAVING_S", 1.0)
    with (
        NodeSession(["sh", "-c", "echo no such thing >&2; exit 3"]) as talk,
        pytest.raises(NoAnswerError, match="no such thing"),
    ):
        talk.receive(10)
    began = time.monotonic()
    with NodeSession(["sleep", "300"]) as talk, pytest.raises(NoAnswerError, match="no answer in 0 s"):
        talk.receive(0.2)
    assert time.monotonic() - began < 5


def test_facts_of_this_machine_are_findings(tmp_path: Path) -> None:
    here = facts(tmp_path)
    assert here["packages"]["hpcrl"]
    assert here["places"]["root"]["path"] == str(tmp_path)
    subjects = [one.subject for one in findings_of_node(here, Purpose())]
    assert {"slurm.root", "open files", "network", "GPU"} <= set(subjects)
    assert [one.level for one in environment_findings(here, here) if one.subject == "environment"] == ["ok"]


def test_other_packages_there_are_an_error(tmp_path: Path) -> None:
    here = facts(tmp_path)
    there = {
        **here,
        "host": "n1",
        "python": "3.9.1",
        "packages": {**here["packages"], "submitit": "0.1"},
    }
    found = {one.subject: one for one in environment_findings(here, there)}
    assert found["environment"].level == "error"
    assert f"submitit {here['packages']['submitit']} here, 0.1 on n1" in found["environment"].found
    assert "3.9.1 on n1" in found["environment"].found


def test_the_jobs_own_environment_has_the_same_hpcrl_and_submitit(tmp_path: Path) -> None:
    here = facts(tmp_path)
    other = {**here["packages"], "torch": "9.9"}
    there = {**here, "host": "n1", "prefix": "/fat", "python": "3.9.1", "packages": other}
    (found,) = environment_findings(here, there, other=True)
    assert (found.level, found.found.partition(":")[0]) == ("ok", "/fat of the jobs on n1")
    (found,) = environment_findings(here, {**there, "packages": {**other, "hpcrl": "0.0.1"}}, other=True)
    assert (found.level, found.found) == ("error", f"hpcrl {here['packages']['hpcrl']} here, 0.0.1 on n1")


def place(**changes: Any) -> dict[str, Any]:
    there = {"path": "/runs", "type": "ext4", "free_bytes": 1e12, "free_inodes": 10**7, "mode": 0o755, "writable": True}
    return there | changes


@pytest.mark.parametrize(
    ("changes", "level", "text"),
    [
        ({}, "ok", "1,000.0 GB free"),
        ({"type": "lustre", "free_inodes": None}, "ok", "inodes not counted"),
        ({"free_bytes": 1e9}, "error", "1.0 GB free"),
        ({"free_bytes": 2e10}, "warning", "20.0 GB free"),
        ({"free_inodes": 50}, "warning", "50 inodes"),
        ({"type": "tmpfs"}, "warning", "tmpfs"),
        ({"type": "fuse.sshfs"}, "warning", "fuse.sshfs"),
        ({"writable": False}, "error", "/runs on n1"),
    ],
)
def test_place_of_runs(changes: dict[str, Any], level: str, text: str) -> None:
    finding = filesystem_finding("root", place(**changes), "n1")
    assert finding.level == level
    assert text in finding.found


GB = 10**9


@pytest.mark.parametrize(("free", "level"), [(100 * GB, "ok"), (30 * GB, "warning"), (5 * GB, "error")])
def test_room_for_what_a_run_writes(free: int, level: str) -> None:
    finding = filesystem_finding("root", place(free_bytes=free), "n1", DiskNeed(10 * GB, 40 * GB, "a checkpoint"))
    assert finding.level == level
    assert ("37.3 GiB" in finding.found) == (level != "ok")
    assert (
        filesystem_finding("root", place(free_bytes=GB), "n1", DiskNeed(GB // 10, GB // 2, "a checkpoint")).level
        == "ok"
    ), "a tiny model"


ON_SLURM = Purpose(requeues=True)


def levels(facts: dict[str, Any], purpose: Purpose = ON_SLURM) -> dict[str, str]:
    return {one.subject: one.level for one in findings_of_node(facts, purpose)}


def test_limits_and_network() -> None:
    well: dict[str, Any] = {
        "host": "n1", "address": "10.0.0.1", "places": {}, "cores": [8, 64], "open_files": 65536, "locked_memory": -1, "ephemeral": [32768, 60999],
        "gpus": [], "devices": [], "torch": None, "scontrol": True, "nsys": None, "containers": ["enroot"], "path": "/bin", "failed_setup": "", "abandoned": [], "left": {},
    }  # fmt: skip
    assert set(levels(well).values()) == {"ok"}
    assert levels({**well, "cores": [1, 64]})["cores"] == "warning"
    assert levels({**well, "cores": [1, 1]})["cores"] == "ok"
    assert levels({**well, "open_files": 256})["open files"] == "error"
    assert levels({**well, "open_files": 4096})["open files"] == "warning"
    on_gpu = {"torch": {"error": ""}, "locked_memory": 65536, "listed": None}
    assert levels({**well, **on_gpu})["locked memory"] == "warning"
    assert "locked memory" not in levels({**well, "locked_memory": 65536}), "a run on CPUs"
    assert levels({**well, "address": "127.0.1.1"})["network"] == "error"
    assert "network" not in levels({**well, "address": "127.0.1.1"}, Purpose(named=False))
    assert levels({**well, "scontrol": False})["scontrol"] == "warning"
    assert levels({**well, "failed_setup": "line 1 (127)"})["slurm.setup"] == "warning"
    assert "scontrol" not in levels({**well, "scontrol": False}, Purpose())
    assert levels(well, Purpose(containers="apptainer"))["apptainer"] == "error"
    assert set(levels(well, Purpose(containers="enroot")).values()) == {"ok"}
    assert levels({**well, "abandoned": ["/tmp/hpcrl-agent-x"]})["left over"] == "ok"
    assert levels({**well, "left": {"nccl-Ab3": 9 << 20}})["left over"] == "warning"
    assert levels({**well, "ephemeral": [9000, 65535]})["network"] == "warning"


@pytest.mark.parametrize(
    ("lacks", "remedy"),
    [
        (USER_NAMESPACES, "user.max_user_namespaces"),
        (TMPFS, "install fuse-overlayfs"),
        (OVERLAY, "install fuse-overlayfs"),
        (FUSE, "/dev/fuse that users may open"),
        (PROC, "/proc are hidden"),
        (ORDINARY_USER, "as an ordinary user"),
        ("", "docs/sandboxes.md"),
    ],
)
def test_what_a_node_lacks_for_sandboxes_has_a_remedy(lacks: str, remedy: str) -> None:
    there = {
        "host": "c1",
        "kernel": "5.14.0",
        "error": "the sandbox did not start",
        "lacks": lacks,
        "fuse_overlayfs": "",
    }
    found = sandbox_finding(there)
    assert (found.level, remedy in found.remedy, "c1, Linux 5.14.0" in found.found) == ("error", True, True)
    started = sandbox_finding({**there, "error": None, "fuse_overlayfs": "/usr/bin/fuse-overlayfs"})
    assert (started.level, "with /usr/bin/fuse-overlayfs" in started.found) == ("ok", True)


def test_a_node_says_whether_it_starts_sandboxes(tmp_path: Path) -> None:
    with node(tmp_path) as there:
        facts_of_it = there.request(120, verb="sandboxes")
    assert facts_of_it.keys() == {"host", "kernel", "fuse_overlayfs", "error", "lacks"}
    if os.geteuid() == 0:
        assert facts_of_it["lacks"] == ORDINARY_USER


def test_clock() -> None:
    assert clock_finding(0.5, 0.1, "n1").level == "ok"
    assert clock_finding(-3.0, 2.0, "n1").level == "ok", "the answer was too slow to tell"
    late = clock_finding(-600.0, 0.1, "n1")
    assert (late.level, "600.00 s behind" in late.found) == ("warning", True)
