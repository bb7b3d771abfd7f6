"""The inside of a devcluster: its configuration files, PID 1 of the cluster and PID 1 of a node.

slurm/devcluster calls `write_files` outside, then starts this file as `_cluster DIR NODES` in new namespaces; that process
starts it as `_node NAME ADDRESS` in newer ones, once per node.
"""

import os
import select
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path

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
AccountingStorageType=accounting_storage/none
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
NodeName=n[1-{nodes}] CPUs=8 RealMemory=64000 Gres=gpu:{gpus}
PartitionName=main Nodes=ALL Default=YES State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
PartitionName=nograce Nodes=ALL State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=0
PartitionName=high Nodes=ALL State=UP PriorityTier=10 PreemptMode=OFF
"""


def write_files(directory: Path, nodes: int) -> None:
    """Lay out DIR/live (what a running cluster needs, removed at its end) and DIR/log (kept until the next `up`)."""
    live, log = directory / "live", directory / "log"
    for folder in (live, log):
        shutil.rmtree(folder, ignore_errors=True)
    spool = [live / f"spool/n{i}" for i in range(1, nodes + 1)]
    for folder in (live / "etc", live / "dev", live / "state", log, *spool):
        folder.mkdir(parents=True)
    conf = SLURM_CONF.format(network=NETWORK, live=live, log=log, nodes=nodes, gpus=GPUS)
    (live / "etc/slurm.conf").write_text(conf)
    (live / "etc/cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    # Slurm hands out numbered device files, so each pretended GPU is another /dev/null.
    (live / "etc/gres.conf").write_text(f"Name=gpu File={live}/dev/gpu[0-{GPUS - 1}]\n")
    for gpu in range(GPUS):
        os.mknod(live / f"dev/gpu{gpu}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    names = {1: "ctl", **{10 + i: f"n{i}" for i in range(1, nodes + 1)}}
    hosts = ["127.0.0.1 localhost", *(f"{NETWORK}.{last} {name}" for last, name in names.items())]
    (live / "hosts").write_text("\n".join(hosts) + "\n")
    (live / "resolv.conf").write_text("# no name server: the cluster is an island\n")


def cluster_main(directory: Path, count: int) -> int:
    """PID 1 of the cluster: lay the network, start the daemons, then reap and watch."""
    live = directory / "live"
    for source, target in (("etc", "/etc/slurm"), ("hosts", "/etc/hosts"), ("resolv.conf", "/etc/resolv.conf")):
        if Path(target).exists():
            do(f"mount --bind {live}/{source} {target}")
    hide_cgroups()
    socket.sethostname("ctl")
    do("ip link set lo up", "ip link add br0 type bridge", f"ip addr add {NETWORK}.1/24 dev br0", "ip link set br0 up")
    # With a way out that answers "unreachable", nodes have a default route as real ones do, and nothing hangs.
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    do("ip route add unreachable default")
    with (directory / "log/slurmctld.err").open("w") as err:
        controller = subprocess.Popen(["slurmctld", "-D"], stdin=subprocess.DEVNULL, stdout=err, stderr=err)
    daemons = {controller.pid: "slurmctld"}
    nodes = [start_node(directory, number) for number in range(1, count + 1)]
    for number, node in enumerate(nodes, 1):
        daemons[node.pid] = f"n{number}"
        connect(f"n{number}", node)
    return watch(daemons)


def do(*commands: str) -> None:
    for line in commands:
        subprocess.run(line.split(), check=True, stdin=subprocess.DEVNULL)


def hide_cgroups() -> None:
    """Cover the machine's cgroups: slurmd would make its own in them, and they would outlive it."""
    if Path("/sys/fs/cgroup").is_dir():
        do("mount -t tmpfs tmpfs /sys/fs/cgroup")


def start_node(directory: Path, number: int) -> subprocess.Popen[bytes]:
    own = [sys.executable, "-B", str(SCRIPT), "_node", f"n{number}", f"{NETWORK}.{10 + number}"]
    with (directory / f"log/n{number}.err").open("w") as err:
        return subprocess.Popen([*UNSHARE, *own], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err)


def connect(name: str, node: subprocess.Popen[bytes]) -> None:
    assert node.stdin
    assert node.stdout
    node.stdout.readline()  # from here on it has its own network namespace
    do(f"ip link add {name} type veth peer name eth0 netns {node.pid}", f"ip link set {name} master br0 up")
    node.stdin.write(b"go\n")
    node.stdin.close()


def watch(daemons: dict[int, str]) -> int:
    """Reap orphans for ever. Until `up` is content any loss ends the cluster, later only that of slurmctld."""
    content = False
    while True:
        if not content and select.select([0], [], [], 0.05)[0]:
            if not os.read(0, 4):
                return 1
            content = True
        pid, how = os.waitpid(-1, 0 if content else os.WNOHANG)
        if name := daemons.pop(pid, None):
            print(f"{name} ended with exit code {os.waitstatus_to_exitcode(how)}", flush=True)
            if name == "slurmctld" or not content:
                return 1


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
    sys.exit(node_main(*arguments) if verb == "_node" else cluster_main(Path(arguments[0]), int(arguments[1])))
