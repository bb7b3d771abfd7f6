"""Sandboxes whose files fuse-overlayfs serves: the same files as with the kernel's overlay, snapshots of either kind, and its process."""

from __future__ import annotations

import os
import signal
import tarfile
import tempfile
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import pytest

from hpcrl.errors import DataError
from hpcrl.sandboxes import sandbox as module
from hpcrl.sandboxes.inside import FUSE, FUSE_OVERLAYFS, TMPFS
from hpcrl.sandboxes.probe import sandbox_facts
from hpcrl.sandboxes.sandbox import Ended, NoSandboxes, Sandbox, SandboxEnded, SandboxError, SandboxLimits
from hpcrl.sandboxes.snapshots import SnapshotStore
from tests.processes import child_of
from tests.sandboxes.material import PATIENCE_S, found_fuse_overlayfs, on_older_kernel

Start = Callable[..., Sandbox]

CHANGES = """
import os
def write(path, text): open(path, "w").write(text)
def remove(path):
    for name in os.listdir(path):
        inner = f"{path}/{name}"
        remove(inner) if os.path.isdir(inner) and not os.path.islink(inner) else os.remove(inner)
    os.rmdir(path)
os.remove("/bin/tar")
remove("/etc"); os.mkdir("/etc", 0o750); write("/etc/new", "new")  # replaces a directory
remove("/tmp"); os.symlink("etc", "/tmp")  # a directory becomes a link
os.remove("/bin/tty"); os.mkdir("/bin/tty"); write("/bin/tty/file", "in it")  # a file becomes a directory
os.remove("/bin/stty"); write("/bin/stty", "again")
os.makedirs("/a/b/c"); write("/a/b/c/file", "moved"); os.rename("/a/b", "/a/d")
write("/a/one", "1"); os.link("/a/one", "/a/two"); os.rename("/a/one", "/a/three"); write("/a/two", "both")
os.rename("/bin/cat", "/a/cat"); os.chmod("/bin/ls", 0o700); write("/a/closed", "secret"); os.chmod("/a/closed", 0)
os.link("/bin/sleep", "/a/sleep")
try: os.rename("/usr", "/other")
except OSError as error: print(error.errno)
"""
LISTING = """
import os, stat
for place, folders, files in sorted(os.walk("/")):
    if place.split("/")[1] in ("dev", "proc"): continue
    for name in sorted(folders + files):
        path = os.path.join(place, name)
        found = os.lstat(path)
        what = os.readlink(path) if stat.S_ISLNK(found.st_mode) else ""
        if stat.S_ISREG(found.st_mode) and found.st_mode & 0o400 and found.st_size < 100: what = open(path, "rb").read()
        print(path, oct(found.st_mode), what, found.st_size if stat.S_ISREG(found.st_mode) else 0)
"""


@pytest.fixture
def fuse_overlayfs() -> str:
    return found_fuse_overlayfs()


def python(sandbox: Sandbox, code: str) -> str:
    ran = sandbox.run(["python3", "-I", "-S", "-c", code], PATIENCE_S)
    assert (ran.code, ran.stderr) == (0, b""), ran
    return ran.stdout.decode()


@pytest.fixture
def store(user: Path) -> SnapshotStore:
    return SnapshotStore(Path(tempfile.mkdtemp(dir=user)))


@pytest.mark.parametrize("older", [True, pytest.param(False, marks=pytest.mark.faults_slow)])
def test_each_kind_of_overlay_goes_on_from_the_other(
    start: Start, store: SnapshotStore, monkeypatch: pytest.MonkeyPatch, older: bool
) -> None:
    kernel = start(fuse_overlayfs="")
    with monkeypatch.context() as patch:
        if older:
            patch.setattr(module, "_COMMAND", on_older_kernel())
        served = start()
        assert (python(served, CHANGES), python(kernel, CHANGES)) == ("18\n", "18\n")
        listed = python(kernel, LISTING)
        assert "/bin/tty/file" in listed
        assert python(served, LISTING) == listed
        of_kernel, of_served = store.put(kernel), store.put(served)
        with store.opened(of_kernel) as snapshot:
            on = start(snapshot=snapshot)
    assert python(on, LISTING) == listed
    assert store.put(on) == of_kernel
    with store.opened(of_served) as snapshot:
        back = start(snapshot=snapshot, fuse_overlayfs="")
    assert python(back, LISTING) == listed
    assert store.put(back) == of_served


def test_names_of_whiteouts_are_no_files(start: Start, store: SnapshotStore) -> None:
    kernel = start(fuse_overlayfs="")
    python(kernel, "open('/etc/.wh.release', 'w')")
    with (
        store.opened(store.put(kernel)) as snapshot,
        pytest.raises(DataError, match=r"keeps no file 'etc/.wh.release'"),
    ):
        start(snapshot=snapshot)
    code = "try: open('/etc/.wh.release', 'w')\nexcept OSError as error: print(error.errno)"
    one = start()
    assert python(one, code) == "22\n"
    for made in (
        "os.mkdir('/tmp/.wh.')",
        "os.symlink('x', '/etc/.wh.release')",
        "os.rename('/etc/release', '/etc/.wh.x')",
    ):
        one = start()
        python(one, f"import os; {made}")
        with pytest.raises(SandboxError, match=r"keeps no file '\.wh\."):
            store.put(one)


def test_a_snapshot_has_what_is_written_to_mapped_memory(start: Start) -> None:
    one, archive = start(), BytesIO()
    code = """
import mmap, time
with open("/tmp/mapped", "wb") as file: file.truncate(1 << 17)
with open("/tmp/mapped", "r+b") as file: mapped = mmap.mmap(file.fileno(), 1 << 17)
mapped[:] = b"dirty..." * (1 << 14)
print("written", flush=True)
time.sleep(600)
"""
    program = one.begin(["python3", "-I", "-S", "-c", code], PATIENCE_S)
    output = program.output()
    assert next(output) == ("stdout", b"written\n")
    os.sched_setscheduler(serving(one), os.SCHED_IDLE, os.sched_param(0))  # as on a busy node
    one.snapshot(archive)
    archive.seek(0)
    with tarfile.open(fileobj=archive) as tar:
        content = tar.extractfile("tmp/mapped")
        assert content
        assert content.read() == b"dirty..." * (1 << 14)
    one.kill()
    list(output)


def test_a_snapshot_of_some_files_syncs_no_others(start: Start) -> None:
    """Those that it leaves out are not opened."""
    one = start()
    python(
        one,
        "import os\nfor number in range(500): open(f'/tmp/{number}', 'w')\nos.mkdir('/etc/a'); open('/etc/a/b', 'w')",
    )
    reads = [count_reads(serving(one))]
    one.snapshot(BytesIO(), ["/etc/a"])
    reads.append(count_reads(serving(one)))
    one.snapshot(BytesIO())
    reads.append(count_reads(serving(one)))
    assert reads[1] - reads[0] < 100 < 500 < reads[2] - reads[1]


def count_reads(process: int) -> int:
    """Return how often a process has read: what serves files does once for each request."""
    return int(Path(f"/proc/{process}/io").read_text().partition("syscr: ")[2].split()[0])


def serving(sandbox: Sandbox) -> int:
    """Return the process that serves the files of a sandbox."""
    parent = child_of(sandbox._process.pid)
    served = child_of(parent) if parent else None
    assert served
    assert Path(f"/proc/{served}/comm").read_text() == "fuse-overlayfs\n"
    return served


def test_what_serves_the_files_is_confined_and_not_seen(start: Start) -> None:
    one = start()
    place = Path(f"/proc/{serving(one)}")
    status = dict(line.split(":\t", 1) for line in (place / "status").read_text().splitlines())
    assert (status["NoNewPrivs"], status["Seccomp"], int(status["CapBnd"], 16), int(status["CapEff"], 16)) == (
        "1",
        "2",
        6,
        6,
    )
    assert (
        len(status["NSpid"].split())
        - len(Path("/proc/self/status").read_text().partition("NSpid:")[2].splitlines()[0].split())
        == 1
    )
    limits = {line[:26].strip(): line[26:].split()[0] for line in (place / "limits").read_text().splitlines()}
    assert (limits["Max data size"], limits["Max core file size"]) == (str(SandboxLimits().memory), "0")
    assert limits["Max processes"] == "0"
    mounts = {
        (line.split()[4], line.split()[5].split(",")[0]) for line in (place / "mountinfo").read_text().splitlines()
    }
    assert {path for path, how in mounts if how == "rw"} == {"/"}, "and that is the sandbox's own memory"
    assert {path.split("/")[1] for path, how in mounts if how == "ro"} <= {
        "lower",
        "proc",
        "usr",
        "lib",
        "lib64",
        "etc",
    }
    seen = python(
        one, "import os\nfor p in filter(str.isdigit, os.listdir('/proc')): print(open(f'/proc/{p}/cmdline').read())"
    )
    assert "inside" in seen
    assert "fuse-overlayfs" not in seen
    assert python(one, "import os; print(os.path.exists('/dev/fuse'))") == "False\n"


def has_ended(process: int) -> bool:
    """Return whether a process is gone, is a zombie, or exits: Linux closes its files (PF_EXITING) before it is a zombie."""
    try:
        state, *_, flags = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[:7]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX" or bool(int(flags) & 4)


@pytest.mark.parametrize("stopped", [False, True])
def test_what_serves_the_files_has_ended_when_the_sandbox_has(start: Start, stopped: bool) -> None:
    """Also where the first process has to be killed."""
    one = start()
    served, first = serving(one), one._process.pid
    if stopped:
        os.kill(first, signal.SIGSTOP)
    one.end()
    assert has_ended(served)


@pytest.mark.parametrize("killed", ["serving", "first"])
def test_a_sandbox_ends_with_what_serves_its_files(start: Start, killed: str) -> None:
    """A program that fails meanwhile has no result: else tests that were running would count as failed."""
    one = start()
    program = one.begin(["sh", "-c", "echo begun; while cat /etc/release; do :; done > /dev/null"], PATIENCE_S)
    output = program.output()
    assert next(output) == ("stdout", b"begun\n")
    served, first = serving(one), one._process.pid
    if killed == "serving":
        os.kill(first, signal.SIGSTOP)  # which would end the sandbox at once
        os.kill(served, signal.SIGKILL)
        time.sleep(0.5)
        os.kill(first, signal.SIGCONT)
    else:
        os.kill(first, signal.SIGKILL)
    with pytest.raises(SandboxEnded):
        list(output)
    one.end()
    deadline = time.monotonic() + PATIENCE_S
    while Path(f"/proc/{served}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.faults_slow
def test_memory_of_what_serves_the_files_counts(start: Start) -> None:
    """It keeps the path of each file that a program has seen."""
    one = start(SandboxLimits(memory=32 << 20))
    many = """
import os, time
for _ in range(15): os.mkdir("x" * 250); os.chdir("x" * 250)
try:
    for number in range(10_000): os.close(os.open(str(number), os.O_CREAT))
except OSError: pass
time.sleep(600)
"""
    ran = one.run(["python3", "-I", "-S", "-c", many], 5 * PATIENCE_S, directory="/tmp")
    assert Ended(ran.code, ran.ended) == Ended(None, "memory")


def test_a_node_of_an_older_kernel(user: Path, monkeypatch: pytest.MonkeyPatch, fuse_overlayfs: str) -> None:
    """Whether there are sandboxes depends on the program, and what is missing has a name."""
    monkeypatch.setattr("tempfile.tempdir", str(user))
    monkeypatch.setattr(module, "_COMMAND", on_older_kernel())
    facts = sandbox_facts()
    assert (facts["fuse_overlayfs"], facts["error"]) == (fuse_overlayfs, None)
    programs = Path(tempfile.mkdtemp(dir=user))
    for name in ("chmod", "rm"):
        (programs / name).symlink_to(f"/bin/{name}")
    monkeypatch.setenv("PATH", str(programs))
    facts = sandbox_facts()
    assert (facts["fuse_overlayfs"], facts["lacks"]) == ("", TMPFS)
    assert "Linux 6.6" in facts["error"]
    assert "fuse-overlayfs is not installed" in facts["error"]


def test_a_node_without_its_device_says_so(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = ["unshare", "-Urm", "sh", "-c", 'mount --bind /dev/null /dev/fuse && exec "$@"', "sh"]
    monkeypatch.setattr(module, "_COMMAND", [*hidden, *module._COMMAND])
    with pytest.raises(NoSandboxes, match="/dev/fuse") as refused:
        start()
    assert refused.value.lacks == FUSE


@pytest.mark.parametrize("lacking", ["library", "interpreter"])
def test_a_program_that_does_not_start_says_why(start: Start, user: Path, fuse_overlayfs: str, lacking: str) -> None:
    """As one of a package manager whose libraries, or whose loader, lie elsewhere; the error said only that the first process ended."""
    program = Path(tempfile.mkdtemp(dir=user)) / "fuse-overlayfs"
    content = Path(fuse_overlayfs).read_bytes()
    assert b"libfuse3.so" in content
    program.write_bytes(content.replace(b"libfuse3.so", b"libfuse9.so") if lacking == "library" else b"#!/nowhere/sh\n")
    program.chmod(0o700)
    said = r"libfuse9\.so.*cannot open" if lacking == "library" else "No such file"
    with pytest.raises(
        NoSandboxes, match=rf"{program} does not start \(.*{said}.*/usr, /lib and /lib64 only"
    ) as refused:
        start(fuse_overlayfs=str(program))
    assert refused.value.lacks == FUSE_OVERLAYFS
