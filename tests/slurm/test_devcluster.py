"""slurm/devcluster against the real Slurm: what jobs see, what `run` passes on, and that `down` leaves nothing."""

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import tomli

from tests.jobs.small_run import wait_for
from tests.slurm.conftest import DEVCLUSTER, DevCluster

sys.path.insert(0, str(DEVCLUSTER.parent))  # the cluster's programs are no package
from devcluster_inside import with_lines

HERE = Path(__file__).parent


def wait_until(condition: Callable[[], bool], what: str, limit: float = 30) -> None:
    wait_for(condition, lambda: f"not within {limit} s: {what}", limit)


# ---- what jobs see


def test_the_directory_may_come_before_or_after_the_verb(tmp_path: Path) -> None:
    for words in (["--dir", str(tmp_path), "status"], ["status", "--dir", str(tmp_path)]):
        done = subprocess.run([str(DEVCLUSTER), *words], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (1, f"down: no cluster in {tmp_path}\n"), done.stderr


def test_nodes_have_names_addresses_and_reach_each_other(cluster: DevCluster) -> None:
    lines = cluster.ask(["srun", "-N4", sys.executable, str(HERE / "meet.py")]).splitlines()
    told = sorted((json.loads(line) for line in lines), key=lambda node: node["name"])
    names = ["n1", "n2", "n3", "n4"]
    assert [node["name"] for node in told] == names
    assert [node["address"] for node in told] == [f"10.77.0.{10 + i}" for i in range(1, 5)]
    for node in told:
        assert node["by_name"] == node["by_address"] == names
        assert node["loopback"] == node["name"]
    assert cluster.ask(["srun", "-w", "n3", "hostname", "-i"]) == "10.77.0.13"


def test_an_outside_address_is_refused_at_once(cluster: DevCluster) -> None:
    code = "import socket; socket.create_connection(('192.0.2.1', 80), timeout=20)"
    began = time.monotonic()
    done = cluster.run(["srun", "-N1", sys.executable, "-c", code])
    assert "No route to host" in done.stderr
    assert time.monotonic() - began < 10


def test_submitit_array_of_two_jobs_on_two_nodes(cluster: DevCluster, tmp_path: Path) -> None:
    env = {**os.environ, "DEVCLUSTER_TEST": "kept"}
    done = cluster.run([sys.executable, str(HERE / "submit_array.py"), str(tmp_path)], env=env)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])  # submitit warns on stdout that sacct fails
    array = told["ids"][0].split("_")[0]
    assert told["ids"] == [f"{array}_0", f"{array}_1"]
    for element, results in enumerate(told["results"]):
        assert [(r["element"], r["node"], r["of"]) for r in results] == [(element, 0, 2), (element, 1, 2)]
        assert len({r["host"] for r in results}) == 2
        assert {(r["id"], r["python"], r["mark"]) for r in results} == {(f"{array}_{element}", sys.executable, "kept")}


def test_gpus_only_for_jobs_that_ask(cluster: DevCluster) -> None:
    show = ["sh", "-c", "echo ${CUDA_VISIBLE_DEVICES-none}"]
    env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}

    def seen(*options: str) -> list[str]:
        return cluster.run(["srun", *options, *show], env=env).stdout.split()

    assert seen("--gres=gpu:2") == ["0,1"]
    assert seen("-N2", "--gpus-per-node=4") == ["0,1,2,3"] * 2
    assert seen() == ["none"]
    assert "node configuration is not available" in cluster.run(["srun", "--gres=gpu:5", "true"]).stderr


def test_refused_wrong_partition_and_accounting(cluster: DevCluster) -> None:
    wrong = cluster.run(["sbatch", "-p", "mian", "--wrap", "true"])
    assert wrong.returncode != 0
    assert "invalid partition specified: mian" in wrong.stderr
    assert cluster.ask(["squeue", "-h"]) == ""
    accounting = cluster.run(["sacct"])
    assert accounting.returncode != 0
    assert "accounting storage is disabled" in accounting.stderr


VICTIM = """#!/bin/bash
say() {{ echo "$@" >> {log}; }}
say "start ${{SLURM_RESTART_COUNT-first}}"
[ -n "$SLURM_RESTART_COUNT" ] && exit 0
export -f say
srun bash -c 'trap "say TERM; sleep 7; say saved; exit 0" TERM; say ready; while :; do sleep 0.1; done'
scontrol requeue $SLURM_JOB_ID
sleep 60
"""


@pytest.mark.faults_slow
def test_preemption_terminates_and_requeues(cluster: DevCluster, tmp_path: Path) -> None:
    """Both steps need 7 s to save: enough in main (GraceTime 20), too much in nograce (KillWait 5)."""
    logs = {name: tmp_path / f"{name}.log" for name in ("main", "nograce")}
    ids = []
    for name, log in logs.items():
        script = tmp_path / f"{name}.sh"
        script.write_text(VICTIM.format(log=log))
        options = ["-p", name, "-N1", "--exclusive", "--parsable", "-o", f"{tmp_path}/{name}.out", str(script)]
        ids.append(cluster.ask(["sbatch", *options]))
    wait_until(lambda: all(log.exists() and "ready" in log.read_text() for log in logs.values()), "both steps run")
    assert len(cluster.ask(["srun", "-p", "high", "-N4", "--exclusive", "hostname"]).split()) == 4
    for name, log in logs.items():
        wait_until(lambda log=log: "start 1" in log.read_text(), f"{name} starts again", 40)
    assert logs["main"].read_text().splitlines() == ["start first", "ready", "TERM", "saved", "start 1"]
    without_grace = logs["nograce"].read_text().splitlines()  # Slurm sends TERM once or twice
    assert without_grace[:3] + without_grace[-1:] == ["start first", "ready", "TERM", "start 1"]
    assert "saved" not in without_grace
    for job in ids:
        assert "Restarts=1" in cluster.ask(["scontrol", "show", "job", "-o", job])
    wait_until(lambda: cluster.ask(["squeue", "-h"]) == "", "the queue is empty")


def test_site_file_fits_the_cluster(cluster: DevCluster) -> None:
    site = tomli.loads((DEVCLUSTER.parent / "sites/devcluster.toml").read_text())["slurm"]
    options = ["-p", site["partition"], "-c", str(site["cpus_per_task"]), "-t", str(site["time_minutes"]), "-N4"]
    assert len(cluster.ask(["srun", *options, "sh", "-c", "; ".join([*site["setup"], "hostname"])]).split()) == 4


# ---- accounting, and daemons and nodes that are gone for a while


@pytest.mark.faults_slow
def test_sacct_knows_what_slurmctld_has_forgotten(accounting: DevCluster) -> None:
    job = accounting.ask(["sbatch", "--parsable", "-o", "/dev/null", "--wrap", "exit 3"])
    wait_until(lambda: accounting.run(["scontrol", "show", "job", job]).returncode != 0, "the job is forgotten", 60)
    asked = ["sacct", "-nXP", "-o", "Cluster,Account,State,ExitCode", "-j", job]
    assert accounting.ask(asked) == "devcluster|root|FAILED|3:0"


@pytest.mark.faults_slow
def test_slurmctld_comes_back_to_the_jobs_that_ran_on(accounting: DevCluster, tmp_path: Path) -> None:
    script = "touch began; until [ -e go ]; do sleep 0.1; done; touch ended"
    job = accounting.ask(["sbatch", "--parsable", "-D", str(tmp_path), "-o", "/dev/null", "--wrap", script])
    wait_until((tmp_path / "began").exists, "the job runs")
    accounting.stop("slurmctld")
    asked = accounting.run(["squeue"])
    assert asked.returncode != 0
    assert "Unable to contact slurm controller" in asked.stderr
    accounting.start("slurmctld")
    assert accounting.ask(["squeue", "-h", "-o", "%i %T"]) == f"{job} RUNNING"
    (tmp_path / "go").touch()
    wait_until((tmp_path / "ended").exists, "the job goes on")
    wait_until(lambda: accounting.ask(["squeue", "-h"]) == "", "the queue is empty")


@pytest.mark.faults_slow
def test_node_is_switched_off_with_all_that_runs_on_it_and_comes_back(accounting: DevCluster, tmp_path: Path) -> None:
    command = ["srun", "-w", "n2", "sh", "-c", f"echo $$ > {tmp_path}/began; exec sleep 300"]
    with subprocess.Popen(accounting.argv("run", *command), stderr=subprocess.PIPE, text=True) as srun:
        wait_until(lambda: (tmp_path / "began").exists(), "the step runs")
        sleeping = {pid for pid, entry in all_processes().items() if entry.command == "sleep 300"}
        assert sleeping
        accounting.stop("n2")
        assert not sleeping & set(all_processes())
        accounting.start("n2")
        # It says that it knows nothing of the step; Slurm notices and ends the job.
        srun.terminate()
        srun.communicate(timeout=60)
    wait_until(lambda: accounting.ask(["squeue", "-h"]) == "", "the queue is empty")
    assert accounting.ask(["srun", "-w", "n2", "hostname"]) == "n2"


def test_stop_and_start_refuse_what_makes_no_sense(accounting: DevCluster) -> None:
    for verb, name, expected in (
        ("stop", "n7", "there is no n7; expected one of: mariadbd, slurmdbd, slurmctld, n1, n2"),
        ("start", "n1", "n1 runs already"),
    ):
        done = subprocess.run(accounting.argv(verb, name), capture_output=True, text=True, timeout=20)
        assert (done.returncode, done.stderr) == (1, f"devcluster: {expected}\n")


def test_lines_for_slurm_conf_take_the_place_of_those_about_the_same(accounting: DevCluster) -> None:
    assert re.search(r"MinJobAge += 2 sec", accounting.ask(["scontrol", "show", "config"]))
    conf = (accounting.directory / "live/etc/slurm.conf").read_text()
    assert conf.count("MinJobAge") == 1
    changed = with_lines(conf, ["KillWait=7", "PartitionName=main Nodes=n1 Default=YES"]).splitlines()
    assert [line for line in changed if line.startswith(("KillWait", "PartitionName=main "))] == changed[-2:]
    assert len(changed) == len(conf.splitlines())


# ---- what `run` passes on


def test_run_keeps_directory_environment_and_exit_code(cluster: DevCluster, tmp_path: Path) -> None:
    env = {**os.environ, "DEVCLUSTER_TEST": "a b"}
    done = cluster.run(["sh", "-c", 'pwd; echo "$DEVCLUSTER_TEST"; hostname; exit 7'], cwd=tmp_path, env=env)
    assert (done.returncode, done.stdout) == (7, f"{tmp_path}\na b\nctl\n")
    piped = subprocess.run(cluster.argv("run", "cat"), input="through", capture_output=True, text=True, timeout=20)
    assert piped.stdout == "through"
    assert cluster.run(["sh", "-c", "kill -9 $$"]).returncode == 128 + 9
    missing = cluster.run(["no-such-program"])
    assert missing.returncode == 127
    assert "no-such-program: No such file" in missing.stderr


def test_run_passes_signals_on(cluster: DevCluster) -> None:
    script = 'trap "exit 9" TERM; echo ready; while :; do sleep 0.1; done'
    with subprocess.Popen(cluster.argv("run", "bash", "-c", script), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.wait(timeout=10) == 9


def test_run_gives_the_terminal_to_the_command(cluster: DevCluster) -> None:
    code = "import time\ntry:\n print('ready'); time.sleep(20)\nexcept KeyboardInterrupt:\n time.sleep(0.2); exit(5)"
    pid, terminal = pty.fork()
    if pid == 0:
        argv = cluster.argv("run", sys.executable, "-uc", code)
        os.execv(argv[0], argv)
    shown = b""
    while b"ready" not in shown:
        shown += os.read(terminal, 100)
    os.write(terminal, b"\x03")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
    os.close(terminal)


# ---- what is left


class Lab:
    """A place for clusters of one test, and what the machine was like before."""

    def __init__(self, directory: Path) -> None:
        self.cluster = DevCluster(directory / "c")
        self.programs = directory / "bin"
        self.env = dict(os.environ)
        self.links, self.mounts = links(), mounts(directory)

    def fake_slurmd(self, script: str) -> None:
        """Put a slurmd before the real one, which still runs on n1."""
        self.programs.mkdir()
        program = self.programs / "slurmd"
        program.write_text(f'#!/bin/sh\ncase "$*" in *n1) exec /usr/sbin/slurmd "$@";; esac\n{script}\n')
        program.chmod(0o755)
        self.env["PATH"] = f"{self.programs}:{self.env['PATH']}"

    def processes(self) -> dict[tuple[int, str], str]:
        """Command lines of the running cluster's process tree, by process id and start time."""
        root = json.loads((self.cluster.directory / "cluster.json").read_text())["pid"]
        everything = all_processes()
        tree = {root}
        while more := {pid for pid, entry in everything.items() if entry.parent in tree} - tree:
            tree |= more
        return {(pid, everything[pid].started): everything[pid].command for pid in tree}

    def assert_nothing_left(self, processes: dict[tuple[int, str], str]) -> None:
        # PID 1 of the cluster's namespace is among them, so those born since are gone if that one is.
        assert len(processes) > 4
        assert alive(processes) == []
        assert links() == self.links
        assert mounts(self.cluster.directory.parent) == self.mounts
        assert sorted(path.name for path in self.cluster.directory.iterdir()) == ["devcluster.lock", "log"]


def mounts(directory: Path) -> list[str]:
    """Return what is mounted, without what other tests, which run at the same time, have mounted in places of their own."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if str(directory) in line or "/pytest-of-" not in line]


class Entry(NamedTuple):
    parent: int
    started: str
    command: str


def all_processes() -> dict[int, Entry]:
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            command = (folder / "cmdline").read_text(errors="replace").replace("\0", " ").strip()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if fields[0] not in "ZX":
            found[int(folder.name)] = Entry(int(fields[1]), fields[19], command)
    return found


def alive(processes: dict[tuple[int, str], str]) -> list[str]:
    now = {(pid, entry.started) for pid, entry in all_processes().items()}
    return [command for key, command in processes.items() if key in now]


def links() -> set[str]:
    return {name for _, name in socket.if_nameindex()}


@pytest.fixture
def lab(needs_slurm: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:  # noqa: ARG001
    lab = Lab(tmp_path_factory.mktemp("lab"))
    yield lab
    lab.cluster.down()


def test_two_clusters_side_by_side_and_nothing_left_of_one(cluster: DevCluster, lab: Lab) -> None:
    host = [Path(path).read_bytes() for path in ("/etc/hosts", "/etc/resolv.conf", "/proc/sys/kernel/hostname")]
    slurm = sorted(os.listdir("/etc/slurm"))
    up = lab.cluster.up(nodes=2, env=lab.env)
    assert up.returncode == 0, up.stderr
    assert f"run --dir {lab.cluster.directory} srun -N2 hostname" in up.stdout
    again = lab.cluster.up()
    assert (again.returncode, "already up" in again.stderr) == (1, True)
    # A job with a process that has left its session, and a job that waits.
    job = ["sbatch", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "srun setsid sleep 300 & wait"]
    for _ in range(2):
        assert lab.cluster.run(job, env=lab.env).returncode == 0
    wait_until(lambda: list(lab.processes().values()).count("sleep 300") == 2, "the job runs on both nodes")
    status = subprocess.run(lab.cluster.argv("status"), capture_output=True, text=True, timeout=20)
    assert status.returncode == 0
    assert re.search(r"up: 2 nodes.*main\*.*n\[1-2\].* R .*n\[1-2\]", status.stdout, re.DOTALL)
    assert cluster.ask(["sinfo", "-hp", "main", "-o", "%D %T"]) == "4 idle"
    assert cluster.ask(["squeue", "-h"]) == ""

    processes = lab.processes()
    assert lab.cluster.down().returncode == 0
    lab.assert_nothing_left(processes)
    assert slurm == sorted(os.listdir("/etc/slurm"))
    assert host == [Path(path).read_bytes() for path in ("/etc/hosts", "/etc/resolv.conf", "/proc/sys/kernel/hostname")]
    assert lab.cluster.down().returncode == 0
    assert "no cluster is up" in lab.cluster.run(["true"]).stderr
    assert subprocess.run(lab.cluster.argv("status"), capture_output=True, timeout=20).returncode == 1
    assert len(cluster.ask(["srun", "-N4", "hostname"]).split()) == 4


def start_up(lab: Lab) -> tuple[subprocess.Popen[str], dict[tuple[int, str], str]]:
    """Start `up`, wait until the fake slurmd of n2 has said something; return it and the processes of the cluster."""
    log = lab.cluster.directory / "log/n2.err"
    argv = lab.cluster.argv("up", "--nodes", "2")
    process = subprocess.Popen(argv, env=lab.env, stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_until(lambda: log.exists() and log.read_text() != "", "the second node starts")
    return process, lab.processes()


def test_up_that_fails_half_way_names_the_log_and_leaves_nothing(lab: Lab) -> None:
    lab.fake_slurmd("echo cannot do this; sleep 1; exit 3")
    process, processes = start_up(lab)
    _, told = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "n2 ended with exit code 3" in told
    assert re.search(r"the end of .*/log/n2.err:\ncannot do this", told)
    lab.assert_nothing_left(processes)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_interrupted_up_leaves_nothing(lab: Lab, number: signal.Signals) -> None:
    lab.fake_slurmd("echo not yet; exec sleep 300")
    process, processes = start_up(lab)
    process.send_signal(number)
    _, told = process.communicate(timeout=20)
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
    assert told == ""
    if number == signal.SIGKILL:
        wait_until(lambda: alive(processes) == [], "the cluster notices that its maker is gone", 10)
        lab.cluster.down()
    lab.assert_nothing_left(processes)


@pytest.mark.parametrize(
    ("before", "arguments", "expected"),
    [
        (["unshare", "--user"], ["up"], "needs root"),
        (
            ["unshare", "--mount", "sh", "-c", 'mount --bind /dev/null /usr/sbin/slurmd && exec "$@"', "sh"],
            ["up"],
            "apt-get install slurm-wlm",
        ),
        ([], ["up", "--conf", "MinJobAge"], "expected a line of slurm.conf, such as MinJobAge=5"),
        ([], ["up", "--gpus", "2xh100:4"], "expected NODESxTYPE:COUNT, as 2xh100:4, for 4 nodes in all"),
        ([], ["stop", "n1"], "no cluster is up"),
        ([], ["up", "--nodes", "0"], "--nodes 0: expected 1 to 64"),
        ([], ["up", "--dir", "/" + "x" * 70], "at most 64 plain characters"),
        ([], ["up", "--dir", str(HERE)], "not empty"),
    ],
    ids=[
        "not root",
        "no slurm",
        "no line of slurm.conf",
        "GPUs of too few nodes",
        "no cluster",
        "no nodes",
        "long path",
        "foreign directory",
    ],
)
def test_refusals_say_what_to_do(
    needs_slurm: None,  # noqa: ARG001
    tmp_path: Path,
    before: list[str],
    arguments: list[str],
    expected: str,
) -> None:
    place = [] if "--dir" in arguments else ["--dir", str(tmp_path / "c")]
    command = [*before, str(DEVCLUSTER), *arguments, *place]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert done.returncode == 1
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "c").exists()
