"""The inside of a devcluster: its configuration files, PID 1 of the cluster and PID 1 of a node.

slurm/devcluster calls `write_files` outside, then starts this file as `_cluster DIR NODES` in new namespaces; that process
starts it as `_node NAME ADDRESS` in newer ones, once per node. `ask` outside tells it to stop and start daemons and nodes.
"""

import contextlib
import os
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import devcluster_accounting as accounting

SCRIPT = Path(__file__).resolve()
NETWORK = "10.77.0"  # every cluster may use the same one: each has its own network namespace
GPUS = 4
UNSHARE = ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]

# auth/none and cred/none: no key, no daemon; nobody outside reaches the cluster's network, and inside everybody is root.
# cred_expire also is the time a requeued job waits before it may start again (120 s by default).
SLURM_CONF = """\
ClusterName=devcluster
SlurmctldHost=ctl({network}.1)
SlurmUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=10
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
{accounting}
JobCompType=jobcomp/none
SlurmctldPidFile={live}/slurmctld.pid
SlurmdPidFile={live}/slurmd.%n.pid
StateSaveLocation={live}/state
SlurmdSpoolDir={live}/spool/%n
SlurmctldLogFile={log}/slurmctld.log
SlurmdLogFile={log}/%n.log
SlurmctldDebug=verbose
SlurmdDebug=verbose
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
KillWait=5
MinJobAge=300
SlurmdTimeout=30
GresTypes=gpu
{of_nodes}
PartitionName=main Nodes=ALL Default=YES State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
PartitionName=nograce Nodes=ALL State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=0
PartitionName=high Nodes=ALL State=UP PriorityTier=10 PreemptMode=OFF
"""


def write_files(
    directory: Path,
    nodes: int,
    with_accounting: bool = False,
    extra: Sequence[str] = (),
    kinds: Sequence[tuple[int, str, int]] = (),
) -> None:
    """Lay out DIR/live (what a running cluster needs, removed at its end) and DIR/log (kept until the next `up`).

    `kinds`: nodes, their type of GPU, and how many of it each has, in the order of the nodes; none: all have GPUS without a type.
    """
    live, log = directory / "live", directory / "log"
    for folder in (live, log):
        shutil.rmtree(folder, ignore_errors=True)
    spool = [live / f"spool/n{i}" for i in range(1, nodes + 1)]
    for folder in (live / "etc", live / "dev", live / "state", log, *spool):
        folder.mkdir(parents=True)
    storage = accounting.SLURM_CONF if with_accounting else accounting.NONE
    of_nodes, gres = gpu_lines(live, kinds or [(nodes, "", GPUS)])
    conf = SLURM_CONF.format(network=NETWORK, live=live, log=log, of_nodes=of_nodes, accounting=storage)
    (live / "etc/slurm.conf").write_text(with_lines(conf, extra))
    if with_accounting:
        accounting.write_files(live, log)
    (live / "etc/cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    # Slurm hands out numbered device files, so each pretended GPU is another /dev/null.
    (live / "etc/gres.conf").write_text(gres)
    for gpu in range(max([GPUS, *(gpus for _, _, gpus in kinds)])):
        os.mknod(live / f"dev/gpu{gpu}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    names = {1: "ctl", **{10 + i: f"n{i}" for i in range(1, nodes + 1)}}
    hosts = ["127.0.0.1 localhost", *(f"{NETWORK}.{last} {name}" for last, name in names.items())]
    (live / "hosts").write_text("\n".join(hosts) + "\n")
    (live / "resolv.conf").write_text("# no name server: the cluster is an island\n")


def gpu_lines(live: Path, kinds: Sequence[tuple[int, str, int]]) -> tuple[str, str]:
    """Return the lines of slurm.conf about nodes, and those of gres.conf."""
    names, gres, first = list[str](), list[str](), 1
    for count, kind, gpus in kinds:
        own, kind_of = f"NodeName=n[{first}-{first + count - 1}]", f" Type={kind}" if kind else ""
        names.append(f"{own} CPUs=8 RealMemory=64000 Gres=gpu:{kind}{':' if kind else ''}{gpus}")
        gres.append(f"{own} Name=gpu{kind_of} File={live}/dev/gpu[0-{gpus - 1}]")
        first += count
    return "\n".join(names), "\n".join(gres) + "\n"


def with_lines(conf: str, extra: Sequence[str]) -> str:
    """Return slurm.conf with these lines, each in the place of the one about the same thing."""
    lines = conf.splitlines()
    for line in extra:
        about = subject(line)
        lines = [old for old in lines if subject(old) != about] + [line]
    return "\n".join(lines) + "\n"


def subject(line: str) -> str:
    """Return what a line of slurm.conf is about: KEY, or partition or node with its name."""
    first = line.split()[0]
    return first if first.startswith(("PartitionName=", "NodeName=")) else first.partition("=")[0]


class Cluster:
    """PID 1 of the cluster: it lays the network, starts daemons and nodes, then reaps, watches and does what it is told."""

    def __init__(self, directory: Path, nodes: int) -> None:
        self._live, self._log = directory / "live", directory / "log"
        self._content = False
        self._running: dict[int, str] = {}
        self._starters: dict[str, Callable[[], subprocess.Popen[bytes]]] = {}
        if accounting.wanted(self._live):
            self._starters["mariadbd"] = lambda: accounting.start_database(self._live, self._log)
            self._starters["slurmdbd"] = lambda: accounting.start_slurmdbd(self._live, self._log)
        self._starters["slurmctld"] = self._slurmctld
        for number in range(1, nodes + 1):
            self._starters[f"n{number}"] = lambda number=number: start_node(self._log, number)

    def _slurmctld(self) -> subprocess.Popen[bytes]:
        with (self._log / "slurmctld.err").open("a") as err:
            return subprocess.Popen(["slurmctld", "-D"], stdin=subprocess.DEVNULL, stdout=err, stderr=err)

    def main(self) -> int:
        for source, target in (("etc", "/etc/slurm"), ("hosts", "/etc/hosts"), ("resolv.conf", "/etc/resolv.conf")):
            if Path(target).exists():
                do(f"mount --bind {self._live}/{source} {target}")
        hide_cgroups()
        socket.sethostname("ctl")
        do("ip link set lo up", "ip link add br0 type bridge")
        do(f"ip addr add {NETWORK}.1/24 dev br0", "ip link set br0 up")
        # With a way out that answers "unreachable", nodes have a default route as real ones do, and nothing hangs.
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        do("ip route add unreachable default")
        for name in self._starters:
            self._start(name)
            accounting.wait_for(name, self._live, lambda: self._look(0.05))
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(str(self._live / "control"))
            door.listen()
            while not self._content:
                self._look(0.05)
            self._serve(door)
        return 1

    def _look(self, wait_s: float) -> None:
        """Wait a little; end all if a daemon or a node is lost, or `up` is, which says when it is content."""
        time.sleep(wait_s)
        for name, code in self._reap():
            print(f"{name} ended with exit code {code}", flush=True)
            sys.exit(1)
        if not self._content and select.select([0], [], [], 0)[0]:
            self._content = bool(os.read(0, 4))
            if not self._content:
                sys.exit(1)

    def _reap(self) -> list[tuple[str, int]]:
        """Reap all the dead, orphans too; return those of them that were started by name."""
        ended = []
        while True:
            try:
                pid, how = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return ended
            if pid == 0:
                return ended
            if name := self._running.pop(pid, None):
                ended.append((name, os.waitstatus_to_exitcode(how)))

    def _serve(self, door: socket.socket) -> None:
        """Reap for ever, and stop and start what `ask` names; return if slurmctld is lost."""
        while True:
            for name, code in self._reap():
                print(f"{name} ended with exit code {code}", flush=True)
                if name == "slurmctld":
                    return
            if select.select([door], [], [], 0.1)[0]:
                caller, _ = door.accept()
                with caller, contextlib.suppress(ConnectionError, TimeoutError):  # it may be gone
                    caller.settimeout(5)
                    verb, _, name = caller.recv(200).decode().partition(" ")
                    caller.sendall(self._do(verb, name).encode())

    def _do(self, verb: str, name: str) -> str:
        """Return "ok", or what is wrong."""
        if name not in self._starters:
            return f"there is no {name}; expected one of: {', '.join(self._starters)}"
        runs = name in self._running.values()
        if runs == (verb == "start"):
            return f"{name} {'runs already' if runs else 'does not run'}"
        try:
            if verb == "start":
                self._start(name)
            else:
                self._stop(name)
        except (OSError, subprocess.SubprocessError) as error:
            return f"cannot {verb} {name}: {error}"
        return "ok"

    def _start(self, name: str) -> None:
        process = self._starters[name]()
        self._running[process.pid] = name
        if name[1:].isdigit():
            connect(name, process)

    def _stop(self, name: str) -> None:
        """End a daemon in order, or switch a node off."""
        pid = next(pid for pid, other in self._running.items() if other == name)
        del self._running[pid]
        if name[1:].isdigit():
            # Its child is PID 1 of the node; the process itself waits for the end of all of them.
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                os.kill(int(child), signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 15
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)


def ask(directory: Path, verb: str, name: str) -> str:
    """Tell the cluster of DIR to stop or start NAME; return "ok", or what is wrong."""
    with socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(60)
        caller.connect(str(directory / "live/control"))
        caller.sendall(f"{verb} {name}".encode())
        return caller.recv(1000).decode()


def do(*commands: str) -> None:
    for line in commands:
        subprocess.run(line.split(), check=True, stdin=subprocess.DEVNULL)


def hide_cgroups() -> None:
    """Cover the machine's cgroups: slurmd would make its own in them, and they would outlive it."""
    if Path("/sys/fs/cgroup").is_dir():
        do("mount -t tmpfs tmpfs /sys/fs/cgroup")


def start_node(log: Path, number: int) -> subprocess.Popen[bytes]:
    own = [sys.executable, "-B", str(SCRIPT), "_node", f"n{number}", f"{NETWORK}.{10 + number}"]
    with (log / f"n{number}.err").open("a") as err:
        return subprocess.Popen([*UNSHARE, *own], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err)


def connect(name: str, node: subprocess.Popen[bytes]) -> None:
    assert node.stdin
    assert node.stdout
    node.stdout.readline()  # from here on it has its own network namespace
    # The link of a node that was switched off a moment ago goes when the kernel has tidied its namespace.
    deadline = time.monotonic() + 10
    while name in (link for _, link in socket.if_nameindex()) and time.monotonic() < deadline:
        time.sleep(0.02)
    do(f"ip link add {name} type veth peer name eth0 netns {node.pid}", f"ip link set {name} master br0 up")
    node.stdin.write(b"go\n")
    node.stdin.close()


def node_main(name: str, address: str) -> int:
    """PID 1 of a node, which is down when this ends."""
    print("here", flush=True)
    sys.stdin.readline()
    socket.sethostname(name)
    do(f"ip addr add {address}/24 dev eth0", "ip link set eth0 up", "ip link set lo up")
    do(f"ip route add default via {NETWORK}.1", "mount -t tmpfs tmpfs /dev/shm")
    slurmd = subprocess.Popen(["slurmd", "-D", "-N", name], stdin=subprocess.DEVNULL, stdout=sys.stderr)
    while True:
        pid, how = os.wait()
        if pid == slurmd.pid:
            return abs(os.waitstatus_to_exitcode(how))


if __name__ == "__main__":
    verb, arguments = sys.argv[1], sys.argv[2:]
    sys.exit(node_main(*arguments) if verb == "_node" else Cluster(Path(arguments[0]), int(arguments[1])).main())
