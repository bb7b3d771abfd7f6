"""Accounting of a devcluster: slurmdbd and a MariaDB of its own, so that sacct answers.

The database lies in DIR/live and listens at a socket there; nothing of the machine's own MariaDB is read or touched.
"""

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

PROGRAMS = {"slurmdbd": "slurmdbd", "mariadbd": "mariadb-server", "mariadb-install-db": "mariadb-server"}
NONE = "AccountingStorageType=accounting_storage/none"
SLURM_CONF = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=ctl
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=5"""

SLURMDBD_CONF = """\
DbdHost=ctl
SlurmUser=root
AuthType=auth/none
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm
PidFile={live}/slurmdbd.pid
LogFile={log}/slurmdbd.log
DebugLevel=info
"""
_LIMIT_S = 30.0


def write_files(live: Path, log: Path) -> None:
    conf = live / "etc/slurmdbd.conf"
    conf.write_text(SLURMDBD_CONF.format(live=live, log=log))
    conf.chmod(0o600)  # slurmdbd insists


def wanted(live: Path) -> bool:
    return (live / "etc/slurmdbd.conf").exists()


def start_database(live: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start MariaDB, with a new database the first time; it answers at a socket only, and asks nobody who he is."""
    # The socket is the door: its directory belongs to root, as does everybody in the cluster.
    data, common = live / "mysql", ["--no-defaults", "--user=root", "--innodb-log-file-size=8M"]
    with (log / "mariadbd.err").open("a") as err:
        if not data.exists():
            install = ["mariadb-install-db", *common, f"--datadir={data}", "--skip-test-db"]
            made = subprocess.run(install, stdin=subprocess.DEVNULL, stdout=err, stderr=err, timeout=_LIMIT_S)
            if made.returncode != 0:
                raise RuntimeError(f"mariadbd failed: no database was made (exit code {made.returncode})")
        places = [f"--datadir={data}", f"--socket={_socket(live)}", f"--pid-file={live}/mariadbd.pid"]
        options = ["--skip-networking", "--skip-grant-tables", "--innodb-buffer-pool-size=32M"]
        command = ["mariadbd", *common, *places, *options]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=err, stderr=err)


def start_slurmdbd(live: Path, log: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "MYSQL_UNIX_PORT": _socket(live)}
    with (log / "slurmdbd.err").open("a") as err:
        nothing = subprocess.DEVNULL
        return subprocess.Popen(["slurmdbd", "-D"], stdin=nothing, stdout=err, stderr=err, env=environment)


def _socket(live: Path) -> str:
    return f"{live}/mariadbd.sock"


def wait_for(name: str, live: Path, pause: Callable[[], None]) -> None:
    """Wait until a daemon that was started can be used: the first start of slurmctld needs slurmdbd, which must know the cluster.

    Args:
        pause: is called between looks, and may give up.
    """
    deadline = time.monotonic() + _LIMIT_S

    def until(done: Callable[[], bool]) -> None:
        while not done():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name} failed: no answer in {_LIMIT_S:.0f} s")
            pause()

    if name == "mariadbd":
        until(Path(_socket(live)).exists)
    elif name == "slurmdbd":
        # The account `root`, to which the user root belongs, is there from the beginning.
        command = ["sacctmgr", "-i", "add", "cluster", "devcluster"]
        until(lambda: subprocess.run(command, capture_output=True, timeout=_LIMIT_S).returncode == 0)
