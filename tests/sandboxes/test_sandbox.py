"""One sandbox: programs, terminals, files, snapshots, and what is left of it."""

from __future__ import annotations

import hashlib
import os
import resource
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random

import pytest

from hpcrl.errors import DamagedError, DataError
from hpcrl.sandboxes import sandbox as module
from hpcrl.sandboxes import snapshots
from hpcrl.sandboxes.archives import PARTIAL
from hpcrl.sandboxes.sandbox import Output, Sandbox, SandboxEnded, SandboxError, SandboxLimits
from hpcrl.sandboxes.snapshots import KEPT_S, SnapshotStore
from tests.envs.sandbox.material import without_namespaces
from tests.paths import ROOT
from tests.processes import child_of
from tests.sandboxes.material import PATIENCE_S, count_processes, found_fuse_overlayfs

Start = Callable[..., Sandbox]

both_kinds = pytest.mark.parametrize(
    "fuse_overlayfs", [False, True], indirect=True, ids=["overlayfs", "fuse-overlayfs"]
)
"""Of a test that is cheap enough for `make test`."""


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.faults_slow)], ids=["overlayfs", "fuse-overlayfs"])
def fuse_overlayfs(request: pytest.FixtureRequest) -> str:
    return found_fuse_overlayfs() if request.param else ""


@pytest.fixture
def kept(user: Path) -> Path:
    """Directory of one test, for snapshots."""
    return Path(tempfile.mkdtemp(dir=user))


def shell(sandbox: Sandbox, text: str, seconds: float = PATIENCE_S) -> Output:
    return sandbox.run(["sh", "-c", text], seconds)


def first_of(sandbox: Sandbox) -> int:
    """Return the first process inside, which is started last, after what serves files."""
    pid = sandbox._process.pid
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[-1])


@contextmanager
def room_for(files: int) -> Iterator[None]:
    """Have this process open no more than so many files meanwhile; none of them is left open."""
    taken = [os.dup(0) for _ in range(files + 1)]
    for each in taken:
        os.close(each)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[-1], limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    free = [os.dup(0) for _ in taken]
    for each in free:
        os.close(each)
    assert free == taken


@pytest.mark.parametrize("files", [0, 2, 4], ids=["socket", "second socket", "process"])
def test_one_for_which_there_are_too_many_open_files_leaves_nothing(image: Path, scratch: Path, files: int) -> None:
    with room_for(files), pytest.raises(OSError, match="Too many open files"):
        Sandbox(image, scratch)
    assert not list(scratch.iterdir())


def test_what_ends_with_its_sandbox_is_lost_with_it(start: Callable[..., Sandbox]) -> None:
    """Its processes end in any order: a program that is killed alone counts as the policy's."""
    one = start()
    pieces = one.begin(["sh", "-c", "echo on; sleep 600"], PATIENCE_S).output()
    assert next(pieces) == ("stdout", b"on\n")
    first = first_of(one)
    supervisor = child_of(first) or 0
    os.kill(first, signal.SIGSTOP)
    os.kill(supervisor, signal.SIGKILL)
    threading.Timer(0.3, one._process.kill).start()
    with pytest.raises(SandboxEnded):
        list(pieces)


def test_a_program_for_which_there_are_too_many_processes_was_not_killed(start: Start, fuse_overlayfs: str) -> None:
    """Its sample fails, and gets no reward of what is the node's fault."""
    one, most = start(), 5 if fuse_overlayfs else 3  # the first process, its parent, and what begins the program
    resource.prlimit(first_of(one), resource.RLIMIT_NPROC, (most, most))
    with pytest.raises(SandboxError, match=r"did not begin: .*Resource temporarily unavailable"):
        one.run(["true"], PATIENCE_S)


def test_limits_of_the_user_that_are_lower_stay(start: Start) -> None:
    """As Slurm hands them on from where a run is submitted: each command ended with 126, and printed nothing."""
    one = start()
    for name in (resource.RLIMIT_NPROC, resource.RLIMIT_NOFILE):
        resource.prlimit(first_of(one), name, (200, 200))
    ran = shell(one, "ulimit -n; ulimit -Hn")
    assert (ran.code, ran.stdout, ran.stderr) == (0, b"200\n200\n", b"")
    one.write("/file", b"x")


def test_a_program_for_which_there_are_too_many_open_files_leaves_none_open(start: Start) -> None:
    one = start()
    for files, terminal in ((0, False), (2, False), (4, False), (6, False), (2, True), (3, True)):
        with room_for(files), pytest.raises(OSError, match="Too many open files"):
            one.run(["true"], PATIENCE_S, terminal=terminal)
    assert shell(one, "exit 3").code == 3


def test_one_whose_server_was_killed_before_it_had_asked_ends_quietly() -> None:
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    own.close()
    with other:
        done = subprocess.run(module._COMMAND, stdin=other.fileno(), capture_output=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_a_program_runs_as_root_of_its_own_files(start: Start, image: Path) -> None:
    one = start(environment={"FROM": "image"}, directory="/tmp")
    ran = one.run(
        ["sh", "-c", 'cat; echo "$FROM $MORE $PWD $$"; id=1; echo mine > /etc/release; echo no >&2; exit 3'],
        PATIENCE_S,
        environment={"MORE": "call"},
    )
    assert (ran.code, ran.ended, ran.stderr) == (3, "", b"no\n")
    assert ran.stdout.startswith(b"image call /tmp ")
    assert one.run(["cat", "release"], PATIENCE_S, directory="/etc").stdout == b"mine\n"
    assert (image / "etc" / "release").read_text() == "tiny\n"
    assert start().run(["cat", "/etc/release"], PATIENCE_S).stdout == b"tiny\n", "another sandbox has its own"
    assert shell(one, "kill -9 $$").code == 128 + 9
    missing = one.run(["nothing"], PATIENCE_S)
    assert (missing.code, missing.stderr) == (127, b"nothing: No such file or directory\n")


def test_names_of_processes_need_not_be_text(start: Start) -> None:
    """The kernel cuts them in the middle of a character, and what looks at their memory reads them."""
    one = start()
    one.write("/tmp/программа.sh", b"#!/bin/sh\nsleep 1.5\n", 0o755)
    assert one.run(["/tmp/программа.sh"], PATIENCE_S).code == 0
    assert shell(one, "echo on").stdout == b"on\n"


def test_a_sandbox_outlives_the_thread_that_began_it(start: Start) -> None:
    begun = list[Sandbox]()
    thread = threading.Thread(target=lambda: begun.append(start()))
    thread.start()
    thread.join()
    time.sleep(0.2)  # a signal would come at the thread's end
    assert shell(begun[0], "echo on").stdout == b"on\n"


def test_output_is_streamed_and_input_is_read(start: Start) -> None:
    one = start()
    waits = "read a; echo got $a; until test -e /go; do sleep 0.05; done; read b; echo got $b >&2"
    output = (program := one.begin(["sh", "-c", waits], PATIENCE_S)).output(b"one\ntwo\n")
    assert next(output) == ("stdout", b"got one\n")
    one.write("/go", b"")
    assert list(output) == [("stderr", b"got two\n")]
    assert program.result == module.Ended(0)


def test_a_terminal(start: Start) -> None:
    program = start().begin(["sh", "-c", "tty; stty size -echo; read a; echo $a"], PATIENCE_S, terminal=True)
    seen = b"".join(piece for _, piece in program.output(b"x\n"))
    assert program.result == module.Ended(0)
    assert seen.endswith(b"x\r\n")
    assert seen.replace(b"x\r\n", b"") == b"/dev/pts/0\r\n24 80\r\n"  # it may be echoed, before that ends


def test_a_program_over_its_time_ends_with_all_that_it_started(start: Start) -> None:
    one = start()
    assert shell(one, "sleep 600 & echo begun").stdout == b"begun\n", "one in the background goes on"
    late = shell(one, "sh -c 'sleep 601 & sleep 602' & sleep 603", 0.5)
    assert (late.code, late.ended) == (None, "time")
    running = shell(one, "cat /proc/[0-9]*/cmdline").stdout
    assert b"600" in running
    assert not any(each in running for each in (b"601", b"602", b"603"))


@pytest.mark.faults_slow
def test_time_for_which_a_job_was_suspended_is_not_a_programs(start: Start) -> None:
    """Tests counted as failed after it."""
    one = start()
    program = one.begin(["sh", "-c", "echo on; until test -e /go; do sleep 0.05; done; exit 3"], 9.0)
    output = program.output()
    assert next(output) == ("stdout", b"on\n")
    processes = [first_of(one)]
    while len(processes) < 3:  # what began the program, and the program
        below = child_of(processes[-1])
        assert below
        processes.append(below)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in processes:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(10.0 if number == signal.SIGSTOP else 0.0)
    one.write("/go", b"")
    assert (list(output), program.result) == ([], module.Ended(3))


def test_a_cancelled_program_and_one_that_writes_too_much(start: Start) -> None:
    one = start()
    program = one.begin(["sleep", "600"], PATIENCE_S)
    program.cancel()
    assert list(program.output()) == []
    assert program.result == module.Ended(None, "cancelled")
    much = one.run(["sh", "-c", "while :; do echo yyyyyyyyyyyyyyyy; done"], PATIENCE_S, most=1000)
    assert (much.ended, len(much.stdout)) == ("output", 1000)


def test_files_are_written_and_read(start: Start) -> None:
    one, content = start(), bytes(range(256)) * 1000
    one.write("/new/directory/file", content, 0o755)
    assert one.read("/new/directory/file") == content
    assert shell(one, "ls -l /new/directory").stdout.split()[2:3] == [b"-rwxr-xr-x"]
    with pytest.raises(SandboxError, match="more than 10 bytes"):
        one.read("/new/directory/file", most=10)
    for path, said in (("/nothing", "No such file"), ("/etc", "no regular file"), ("/dev/zero", "no regular file")):
        with pytest.raises(SandboxError, match=said):
            one.read(path)
    with pytest.raises(DataError, match="absolute path"):
        one.read("etc/release")
    with pytest.raises(SandboxError, match="write a file instead"):
        one.run(["x" * 200_000], 1.0)


CHANGES = """
rm /etc/release; mkdir /etc/new; rm -r /bin/tar; mkdir -p /a/b; echo one > /a/b/file; ln /a/b/file /a/hard; ln -s /a/b/file /a/soft
ln -s ../../../../etc /a/up; mkfifo /a/queue; rm -r /tmp; mkdir /tmp; echo secret > /a/closed; python3 -I -S -c 'import os; os.chmod("/a/closed", 0)'
"""


@both_kinds
def test_a_snapshot_begins_another_sandbox(start: Start, kept: Path) -> None:
    store, one = SnapshotStore(kept / "snapshots"), start()
    assert shell(one, CHANGES).stderr == b""
    digest = store.put(one)
    assert store.put(one) == digest
    assert shell(one, "echo on").stdout == b"on\n", "programs go on after it"
    one.end()
    with store.opened(digest) as snapshot:
        other = start(snapshot=snapshot)
    found = shell(other, "ls /etc /tmp /bin/tar; cat /a/hard /a/soft /a/up/release; ls -l /a")
    assert b"cannot access '/bin/tar'" in found.stderr
    assert b"/a/up/release: No such file" in found.stderr
    assert found.stdout.startswith(b"/etc:\nnew\n\n/tmp:\none\none\n")
    for line in (b"---------- 1", b"prw-r--r-- 1", b"-rw-r--r-- 2"):
        assert line in found.stdout
    assert store.put(other) == digest, "the same changes have the same name"
    with pytest.raises(DataError, match="no snapshot"), store.opened("../x"):
        pass
    (block,) = (kept / "snapshots" / "blocks").iterdir()
    for damaged in (block, kept / "snapshots" / f"{digest}.blocks"):
        damaged.write_bytes(damaged.read_bytes()[:-9] + b"x" * 9)
        with pytest.raises(DamagedError), store.opened(digest):
            pass
        assert store.put(other) == digest, "it is written again"
        with store.opened(digest):
            pass


def test_a_snapshot_of_some_paths(start: Start, kept: Path) -> None:
    """What is elsewhere is as in the image, the directories above them included; what is in them is as it was."""
    store, one = SnapshotStore(kept / "some"), start()
    shell(
        one,
        "rm -r /etc && mkdir -m 700 /etc /etc/new && echo a > /etc/new/a && echo b > /etc/b; python3 -c 'import os; os.chmod(\"/tmp\", 0o1777)'; cd /tmp; mkdir -m 711 kept other;"
        "echo l > other/linked; ln other/linked kept/link; echo x > beside; rm /bin/cat; ln -s /bin /deep; mkdir -p /a/b/c /a/x",
    )
    with store.opened(store.put(one, ["/etc/new", "/tmp/kept/", "/a/b/c", "/bin/cat", "/none"])) as part:
        other = start(snapshot=part)
    code = """
import os
print(sorted(os.listdir('/etc')), sorted(os.listdir('/etc/new')), sorted(os.listdir('/tmp')), open('/tmp/kept/link').read())
print(*(oct(os.stat(one).st_mode)[-4:] for one in ('/etc/new', '/tmp', '/tmp/kept')), sorted(os.listdir('/a')), os.listdir('/a/b'))
print(os.path.exists('/bin/cat'), os.path.exists('/bin/ls'), os.path.exists('/deep'), open('/etc/release').read())
"""
    assert other.run(["python3", "-I", "-S", "-c", code], PATIENCE_S).stdout.decode().split() == (
        [
            "['new',",
            "'release']",
            "['a']",
            "['kept']",
            "l",
            "0700",
            "1777",
            "0711",
            "['b']",
            "['c']",
            "False",
            "True",
            "False",
            "tiny",
        ]
    )


def test_each_snapshot_stores_what_has_changed(start: Start, kept: Path) -> None:
    store, one, folder = SnapshotStore(kept / "changes"), start(), kept / "changes"

    def stored() -> int:
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

    for number in range(8):
        one.write(f"/data-{number}", Random(number).randbytes(3 << 20))
    first, whole = store.put(one), stored()
    assert whole > 24 << 20
    assert shell(one, "echo new > /a; echo new > /data-4b; rm /data-6").stderr == b""
    second, more = store.put(one), stored() - whole
    assert more < 12 << 20, "three changes, each in a block or two"
    for digest, names in ((first, b"/data-6\n"), (second, b"/a\n/data-4b\n")):
        with store.opened(digest) as snapshot:
            other = start(snapshot=snapshot)
        found = shell(other, "ls /a /data-4b /data-6 2>&-")
        assert found.stdout == names
        assert store.put(other) == digest
        other.end()
    old = time.time() - 2 * KEPT_S
    for path in folder.rglob("*"):
        os.utime(path, (old, old))
    store.hold(second)
    assert store.collect(lambda: []) > 0
    with store.opened(second), pytest.raises(DataError, match="no snapshot"), store.opened(first):
        pass
    os.utime(folder / f"{second}.blocks", (old, old))
    assert store.collect(lambda: [second]) == 0
    store.collect(lambda: [])
    assert [path for path in folder.rglob("*") if path.is_file()] == []


def stopped(word: bytes) -> bool:
    """Return whether a process with a word in its command line is stopped."""
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if word in (path / "cmdline").read_bytes() and b") T " in (path / "stat").read_bytes():
                return True
    return False


class SlowStore(SnapshotStore):
    """A store that writes nothing before the programs of a sandbox go on, for a while."""

    def _stage(self, name: str, stage: str, block: bytes) -> bool:
        deadline = time.monotonic() + 2 * module._TRANSFER_S
        while stopped(b"986.25") and time.monotonic() < deadline:
            time.sleep(0.05)
        return super()._stage(name, stage, block)


def test_programs_do_not_wait_for_the_filesystem_of_snapshots(
    start: Start, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were killed then, and the snapshot was refused as if they had hindered it: a reward of 0."""
    monkeypatch.setattr("hpcrl.sandboxes.sandbox._TRANSFER_S", 10.0)
    for name in ("SMALLEST", "LARGEST"):
        monkeypatch.setattr(snapshots, name, 64 << 10)
    one = start()
    assert shell(one, "sleep 986.25 & echo begun").stdout == b"begun\n"
    one.write("/file", os.urandom(3 << 20))
    digest = SlowStore(kept).put(one)
    assert len(list((kept / "blocks").iterdir())) > 40
    assert (kept / f"{digest}.blocks").is_file()


def test_a_collector_that_is_killed_takes_nothing_along(
    start: Start, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was killed between its two names of a block that a snapshot had just named once more, which was lost half an hour later."""
    store, one, place = SnapshotStore(kept / "killed"), start(), kept / "killed"
    one.write("/file", b"content")
    digest = store.put(one)
    files = [place / f"{digest}.blocks", *(place / "blocks").iterdir()]
    assert len(files) == 2
    for path in files:
        child = os.fork()
        if child == 0:
            monkeypatch.setattr(snapshots, "_is_old", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            snapshots._removed(path, 0.0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        assert not path.exists()
    with store.opened(digest) as snapshot:
        other = start(snapshot=snapshot)
    assert other.read("/file") == b"content"
    old = time.time() - 2 * KEPT_S
    (left,) = (path for path in place.iterdir() if path.is_file())
    os.utime(left, (old, old))
    store.hold(digest)
    assert store.collect(list) == 0
    assert all(path.exists() for path in files)
    for path in files:
        path.with_name(f"{PARTIAL}{path.name}").write_bytes(b"of a snapshot that was put since")
        os.utime(path, (old, old))
    assert store.collect(lambda: [digest]) == 0
    assert store.collect(list) == 2
    assert [path for path in place.rglob("*") if path.is_file()] == []


def test_what_a_list_of_blocks_names_is_in_the_directory(user: Path) -> None:
    """A damaged block is removed, and no list leads to a file of another directory."""
    place = user / "lists"
    blocks, other = place / "kept" / "blocks", place / "other.z"
    blocks.mkdir(parents=True)
    other.write_bytes(b"content")
    store = SnapshotStore(place / "kept")
    for listed in (b"../../other\n", f"{place}/other\n".encode(), b"\xff\n"):
        digest = hashlib.sha256(listed).hexdigest()
        (place / "kept" / f"{digest}.blocks").write_bytes(listed)
        with pytest.raises(DamagedError, match=digest), store.opened(digest):
            pass
    assert other.read_bytes() == b"content"


def test_what_is_no_list_keeps_no_blocks(user: Path) -> None:
    """Snapshots of earlier versions are whole archives, which may be large."""
    place = user / "earlier"
    blocks, name = place / "blocks", "0" * 64
    blocks.mkdir(parents=True)
    (blocks / f"{name}.z").write_bytes(b"old")
    (place / f"{name}.tar.gz").write_bytes(name.encode())
    os.utime(blocks / f"{name}.z", (0, 0))
    assert SnapshotStore(place).collect(list) == 1
    assert not list(blocks.iterdir())


def test_a_snapshot_has_bounds(start: Start, kept: Path) -> None:
    one = start(SandboxLimits(disk=1 << 20))
    sparse = "import os\nfor n in range(4):\n    with open(f'/s{n}', 'w') as f: f.truncate(1 << 20)"
    assert one.run(["python3", "-I", "-S", "-c", sparse], PATIENCE_S).stderr == b""
    with pytest.raises(SandboxError, match="more than 1048576 bytes"):
        SnapshotStore(kept / "bounded").put(one)
    assert not [path for path in (kept / "bounded").rglob("*") if path.is_file()]


def test_what_fits_into_a_sandbox_fits_into_the_next_one(start: Start, kept: Path) -> None:
    limits, store = SandboxLimits(disk=320 << 12, files=600), SnapshotStore(kept / "full")
    one = start(limits)
    code = """
import os
os.mkdir('/full')
for n in range(300):
    with open(f'/full/{n}', 'wb') as f: f.write(b'x' * 4096)
for n in range(100):
    os.link('/full/0', f'/full/same-{n}')
"""
    assert one.run(["python3", "-I", "-S", "-c", code], PATIENCE_S).stderr == b""
    with store.opened(store.put(one)) as snapshot:
        assert shell(start(limits, snapshot=snapshot), "ls /full").stdout.count(b"\n") == 400


def test_snapshots_at_a_time_are_each_of_one_moment(start: Start, kept: Path) -> None:
    """Its program writes /a and then /z; a snapshot reads /a first, and much else before /z."""
    one, store = start(), SnapshotStore(kept / "together")
    one.run(["sh", "-c", "mkdir /m; i=0; while [ $i -lt 3000 ]; do : > /m/$i; i=$((i+1)); done"], PATIENCE_S)
    loop = "i=0; while :; do i=$((i+1)); echo $i > /a; echo $i > /z; done"
    shell(one, f"({loop}) < /dev/null > /dev/null 2>&1 &")
    with ThreadPoolExecutor(4) as threads:
        digests = list(threads.map(lambda _: store.put(one), range(4)))
    for digest in digests:
        with store.opened(digest) as snapshot:
            other = start(snapshot=snapshot)
        first, last = (shell(other, f"cat /{name}").stdout for name in "az")
        assert b"" in (first, last) or int(first) - int(last) in (0, 1)  # the shell empties a file before it writes


def test_no_network_but_its_own(start: Start) -> None:
    code = """
import socket
server = socket.create_server(("127.0.0.1", 0))
socket.create_connection(server.getsockname())
try: socket.create_connection(("198.51.100.1", 80))
except OSError as error: print(error.strerror)
"""
    assert start().run(["python3", "-I", "-S", "-c", code], PATIENCE_S).stdout == (b"Network is unreachable\n")
    interfaces = shell(start(network=True), "cat /proc/net/dev").stdout
    own = Path("/proc/net/dev").read_bytes()
    assert interfaces.count(b":") == own.count(b":")
    assert shell(start(), "cat /proc/net/dev").stdout.count(b":") == 1


OWNER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from hpcrl.sandboxes.sandbox import Sandbox
one = Sandbox(Path(sys.argv[2]), Path(sys.argv[3]), fuse_overlayfs=sys.argv[4])
program = one.begin(["sh", "-c", "sleep 987.25 & echo begun; sleep 987.25"], 600.0)
output = program.output()  # the program ends with it
print(next(output)[1].decode(), flush=True)
sys.stdin.read()
"""


@both_kinds
def test_a_sandbox_ends_with_its_owner_also_one_that_is_killed(image: Path, user: Path, fuse_overlayfs: str) -> None:
    place = user / "owner"
    place.mkdir()
    command = [module._COMMAND[0], "-S", "-c", OWNER, str(ROOT), str(image), str(place), fuse_overlayfs]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline() == "begun\n"
    assert count_processes("987.25")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    deadline = time.monotonic() + PATIENCE_S
    while count_processes("987.25") or count_processes(str(place)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert str(place) not in Path("/proc/self/mountinfo").read_text()
    (left,) = place.iterdir()  # an empty directory, which goes with the scratch directory of the owner
    left.rmdir()
    place.rmdir()


def test_what_runs_in_a_sandbox_whose_first_process_is_killed_has_no_result(start: Start) -> None:
    """Else tests that were running would count as failed."""
    one = start()
    program = one.begin(["sh", "-c", "echo begun; sleep 985.25"], 600.0)
    output = program.output()
    assert next(output) == ("stdout", b"begun\n")
    one._process.send_signal(signal.SIGKILL)
    with pytest.raises(module.SandboxEnded):
        list(output)
    with pytest.raises(module.SandboxEnded):
        one.read("/etc/passwd")


def test_an_end_is_final(start: Start) -> None:
    one = start()
    program = one.begin(["sleep", "986.25"], 600.0)
    one.end()
    assert count_processes("986.25") == 0
    with pytest.raises(module.SandboxEnded):
        list(program.output())
    with pytest.raises(SandboxError, match="has ended"):
        one.run(["true"], 1.0)


def test_a_node_without_user_namespaces_says_so(image: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_COMMAND", [*without_namespaces(), *module._COMMAND])
    with pytest.raises(SandboxError, match=r"did not start: .*unshare"):
        Sandbox(image, scratch)


@both_kinds
def test_a_node_that_runs_out_of_memory_files(start: Start) -> None:
    one = start(SandboxLimits(disk=1 << 20, files=200))
    full = one.run(["python3", "-I", "-S", "-c", "open('/x', 'wb').write(bytes(2 << 20))"], PATIENCE_S)
    assert b"Errno 28" in full.stderr or b"Errno 27" in full.stderr
    with pytest.raises(SandboxError, match="No space left"):
        one.write("/y", bytes(1 << 20))
    assert shell(one, "rm /x /y; echo room").stdout == b"room\n"


def test_a_program_begins_as_soon_as_it_is_written(start: Start) -> None:
    one = start()
    for number in range(40):
        one.write(f"/{number}", b"#!/bin/sh\nexit 3\n", 0o755)
        assert one.run([f"/{number}"], PATIENCE_S) == Output(3, "", b"", b"")
