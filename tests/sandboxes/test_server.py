"""The server of a node's sandboxes, over HTTP: keys, bounds, leases, clients that are gone, and what a killed one leaves."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from hpcrl.runtime.scratch import remove_abandoned
from hpcrl.sandboxes import node as nodes
from hpcrl.sandboxes import sandbox as module
from hpcrl.sandboxes.images import ImageStore
from hpcrl.sandboxes.node import MOST_REQUESTS, NodeFull, NodeSandboxes
from hpcrl.sandboxes.snapshots import SnapshotStore
from tests.paths import ROOT
from tests.processes import command_of, parent_of, send
from tests.sandboxes.material import PATIENCE_S, TOKEN, Client, count_processes, python_of_users


def test_a_sandbox_from_its_start_to_its_end(serving: Callable[..., Any]) -> None:
    with serving() as node:
        one = node.start()
        assert node.ask("/health", "GET").json() == {"running": 1, "most": 2}
        assert one.ask("/write", path="/a/file", content=base64.b64encode(b"content").decode()).status_code == 200
        ended, text = one.run(
            "cat /a/file; cat; tty >&2; exit 5", input=base64.b64encode(b" given\n" * 30_000).decode()
        )
        assert ended == {"code": 5, "ended": ""}
        assert text.replace(" given\n", "") in ("contentnot a tty\n", "not a tty\ncontent")
        assert text.count(" given\n") == 30_000
        assert one.run("tty", terminal=True) == ({"code": 0, "ended": ""}, "/dev/pts/0\r\n")
        for typed in ("", "line\n", "line\nno end"):
            ended, text = one.run("stty -echo; cat", terminal=True, input=base64.b64encode(typed.encode()).decode())
            assert ended == {"code": 0, "ended": ""}
            assert text.replace("\r\n", "\n").endswith(typed)
        assert one.run("sleep 600", 0.2)[0] == {"code": None, "ended": "time"}
        assert one.run('echo "$A $PWD"', environment={"A": "b"}, directory="/etc")[1] == "b /etc\n"
        assert base64.b64decode(one.ask("/read", path="/a/file").json()["content"]) == b"content"
        snapshot = one.ask("/snapshot").json()["snapshot"]
        assert one.ask("/end").json() == {}
        assert one.ask("/renew").status_code == 401
        assert node.start(snapshot=snapshot).run("cat /a/file")[1] == "content"


def test_sandboxes_that_stand_still_are_killed_beside_each_other(
    store: ImageStore, user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_GRACE_S", 5.0)
    node = NodeSandboxes(store, SnapshotStore(user / "snapshots"), 6, 600.0)
    try:
        for _ in range(6):
            node.start("tiny", client=nodes.Client("worker", 1.0))
        own = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
        first = [pid for pid in own if "hpcrl.sandboxes.inside" in command_of(pid) and parent_of(pid) == os.getpid()]
        assert len(first) == 6
        send(first, signal.SIGSTOP)
        began = time.monotonic()
        node.start("tiny", client=nodes.Client("worker", 2.0))  # it has restarted
        assert time.monotonic() - began < 5 * module._GRACE_S
    finally:
        node.close()


def test_a_key_is_for_its_sandbox_alone(serving: Callable[..., Any]) -> None:
    with serving() as node:
        one, other = node.start(), node.start()
        one.run("echo one > /mine")
        assert other.run("cat /mine")[0]["code"] == 1
        nobody = Client(node._url, "guess")
        for client, path in ((nobody, "/start"), (nobody, "/exec"), (nobody, "/end")):
            assert client.ask(path, image="tiny").status_code == 401
        assert one.ask("/start", image="tiny").status_code == 401
        assert one.ask("/health", "GET").status_code == 401
        assert one.ask("/other").status_code == 404
        for path in ("/exec", "/read", "/end"):
            assert node.ask(path, path="/etc/release").status_code == 401
        assert node.ask("/health", "GET").json()["running"] == 2


def test_a_full_node_says_what_to_do(serving: Callable[..., Any]) -> None:
    with serving(most=1) as node:
        one = node.start()
        full = node.ask("/start", image="tiny")
        assert full.status_code == 503
        assert (
            full.json()["error"]
            == "this node has 1 sandboxes of at most 1; ask another node, or again when one has ended"
        )
        one.ask("/end")
        one = node.start()
        streams = [one.stream("echo begun; sleep 600") for _ in range(MOST_REQUESTS)]
        lines = [stream.__enter__().iter_lines() for stream in streams]
        assert all(map(next, lines))
        busy = one.ask("/read", path="/etc/release")
        assert (busy.status_code, "at a time" in busy.text) == (429, True)
        for stream in streams:
            stream.__exit__(None, None, None)


def test_a_sandbox_whose_client_is_gone_ends(serving: Callable[..., Any]) -> None:
    with serving(lease_s=4.0) as node:
        gone, running = node.start(), node.start()
        with running.stream("echo begun; sleep 600") as answer:
            lines = answer.iter_lines()  # httpx closes the connection with it
            assert next(lines)
            eventually(lambda: node.ask("/health", "GET").json()["running"] == 1)
            assert gone.ask("/renew").status_code == 401
            assert running.ask("/renew").status_code == 200, "one with a program at work goes on"
        eventually(lambda: node.ask("/health", "GET").json()["running"] == 0)  # first its program, then the lease


def test_a_start_whose_client_is_gone_takes_no_place(
    serving: Callable[..., Any], store: ImageStore, user: Path
) -> None:
    """An image is unpacked for minutes. What began then had its place until the end of its lease."""
    with serving(most=1) as node:
        (place,) = (user / "temporary").glob("hpcrl-sandboxes-*")
        with (place / f"{store.find('tiny').digest}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another one unpacks the image
            url = httpx.URL(node._url)
            with socket.create_connection((url.host, url.port)) as connection:
                body = b'{"image": "tiny"}'
                head = f"POST /start HTTP/1.1\r\nhost: node\r\nauthorization: Bearer {TOKEN}\r\ncontent-length: {len(body)}\r\n\r\n"
                connection.sendall(head.encode() + body)
                eventually(lambda: node.ask("/health", "GET").json()["running"] == 1)
        eventually(lambda: node.ask("/health", "GET").json()["running"] == 0)
        assert node.start().run("echo on")[1] == "on\n"


def test_the_time_for_which_a_server_stood_still_ends_no_lease(
    store: ImageStore, user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its job was suspended, for instance: its clients have asked meanwhile, and were not heard."""
    monkeypatch.setattr("hpcrl.sandboxes.node.LONGEST_STILL_S", 0.2)
    node = NodeSandboxes(store, SnapshotStore(user / "snapshots"), 1, 1.0)
    try:
        node.start("tiny")
        time.sleep(1.5)
        assert node.end_expired() == 0
        eventually(lambda: node.end_expired() == 1)
    finally:
        node.close()


SMALL_DISK = """
import os, sys, tempfile
sys.path[:0] = sys.argv[1:3]
from pathlib import Path
from hpcrl.envs.sandbox import namespaces
place = Path(sys.argv[3])
namespaces.unshare(os.getuid(), os.getgid(), network=True)
namespaces.mount("tmpfs", str(place), "tmpfs", 0, "size=4m")
tempfile.tempdir = str(place)
from hpcrl.sandboxes.images import ImageStore
from hpcrl.sandboxes.node import NodeSandboxes
from hpcrl.sandboxes.snapshots import SnapshotStore
node = NodeSandboxes(ImageStore(Path(sys.argv[4])), SnapshotStore(place / "snapshots"), 2, 600.0)
first = node.start("first")
for after in (lambda: None, lambda: node.end(first)):
    after()
    try:
        second = node.start("second")
    except OSError as error:
        print(error.strerror)
with node.use(second) as held:
    print(len(held.sandbox.read("/file")), node.running)
third = node.start("third")
node.end(second)
with node.use(third) as held:
    held.sandbox.write("/changes", bytes(2 << 20))
print(len(node.keep(third)))
node.close()
print(os.listdir(place))
"""


def test_images_that_no_sandbox_uses_make_room_for_others_and_for_snapshots(user: Path) -> None:
    """Tasks with an image each filled the disks of the nodes, which then started no sandbox any more."""
    root, place, python = user / "many", user / "small", python_of_users()
    place.mkdir()
    for name, size in (("first", 3 << 20), ("second", 3 << 20), ("third", 1)):
        tree = user / f"tree-{name}"
        tree.mkdir()
        (tree / "file").write_bytes(name[:1].encode() * size)
        ImageStore(root).add(name, tree)
    command = [python, "-c", SMALL_DISK, str(ROOT), str(Path(httpx.__file__).parents[1]), str(place), str(root)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.stderr) == (f"No space left on device\n{3 << 20} 1\n64\n['snapshots']\n", "")


def test_what_a_filesystem_refuses_is_named(serving: Callable[..., Any], user: Path) -> None:
    with serving() as node:
        (place,) = (user / "temporary").glob("hpcrl-sandboxes-*")
        one = node.start()
        one.run("echo x > /file")
        (user / "snapshots" / "blocks").mkdir(parents=True, exist_ok=True)
        for ask, directory in (
            (lambda: node.ask("/start", image="tiny"), place),
            (lambda: one.ask("/snapshot"), user / "snapshots" / "blocks"),
        ):
            directory.chmod(0o500)
            answer = ask()
            directory.chmod(0o700)
            assert (answer.status_code, "Permission denied" in answer.json()["error"]) == (500, True), answer.text
            assert ask().status_code == 200


def test_a_program_ends_with_its_client(serving: Callable[..., Any]) -> None:
    with serving() as node:
        one = node.start()
        with one.stream("sleep 985.25 & echo begun; while :; do echo more; done") as answer:
            assert next(answer.iter_lines())
        eventually(lambda: "985.25" not in one.run("for p in /proc/[0-9]*; do ls -l $p/exe; cat $p/cmdline; done")[1])


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


LACKING = [
    ("/exec", {}, "command: expected list"),
    ("/exec", {"command": [], "seconds": 1}, "list of texts"),
    ("/exec", {"command": ["sh", 1], "seconds": 1}, "list of texts"),
    ("/exec", {"command": ["sh"], "seconds": 0}, "seconds: expected more than 0"),
    ("/exec", {"command": ["sh"], "seconds": True}, "seconds: expected float"),
    ("/exec", {"command": ["sh"], "seconds": 1, "input": "%"}, "base64"),
    ("/exec", {"command": ["sh"], "seconds": 1, "environment": {"A": 1}}, "environment: expected texts"),
    ("/exec", {"command": ["sh\0"], "seconds": 1}, "null character"),
    ("/exec", {"command": ["sh"], "seconds": 1, "environment": {"A=B": "c"}}, "null character or ="),
    ("/exec", {"command": ["x" * 200_000], "seconds": 1}, "write a file instead"),
    ("/exec", {"command": ["sh"], "seconds": 1, "more": 1}, "expected an object with command"),
    ("/write", {"path": "relative", "content": ""}, "absolute path"),
    ("/write", {"path": "/a\0", "content": ""}, "absolute path"),
    ("/write", {"path": "/x", "content": "", "mode": "7"}, "mode: expected int"),
    ("/read", {"path": "/nothing"}, "No such file"),
    ("/end", {"more": 1}, "expected an object with no fields"),
]


def test_commands_end_with_their_server(serving: Callable[..., Any], capfd: pytest.CaptureFixture[str]) -> None:
    """Each answer ends as that of a lost sandbox does, and the log has nothing of it."""
    with ExitStack() as stack:
        with serving() as node:
            streams = [stack.enter_context(node.start().stream("echo begun; sleep 600")) for _ in range(2)]
            lines = [stream.iter_lines() for stream in streams]
            assert [base64.b64decode(json.loads(next(one))["stdout"]) for one in lines] == [b"begun\n"] * 2
        ends = [[json.loads(line) for line in one if line != "{}"] for one in lines]
    assert not any("code" in last for end in ends for last in end)
    assert "ASGI" not in capfd.readouterr().err


def test_a_start_ends_with_its_node_and_leaves_nothing(
    store: ImageStore, user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had its directory removed below it: files that it wrote meanwhile stayed for good, without the lock by which others find them."""
    temporary = Path(tempfile.mkdtemp(dir=user))
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    node = NodeSandboxes(store, SnapshotStore(user / "snapshots"), 1, 600.0)
    (place,) = temporary.iterdir()
    with ThreadPoolExecutor(2) as threads, (place / f"{store.find('tiny').digest}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another one unpacks the image
        starting = threads.submit(node.start, "tiny")
        while not node.running:
            time.sleep(0.01)
        closing = threads.submit(node.close)
        time.sleep(0.2)
        assert not closing.done()
        fcntl.flock(lock, fcntl.LOCK_UN)
        with pytest.raises(NodeFull, match="ends"):
            starting.result(PATIENCE_S)
        closing.result(PATIENCE_S)
    assert not list(temporary.iterdir())


def test_a_command_that_writes_nothing_is_heard_of(
    serving: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcrl.sandboxes.server.BEAT_S", 0.05)
    with serving() as node:
        one = node.start()
        with one.stream("until test -e /heard; do sleep 0.05; done; echo ends") as stream:
            lines = stream.iter_lines()
            assert next(lines) == "{}"
            one.ask("/write", path="/heard", content="")
            *_, written, last = (line for line in lines if line != "{}")
        assert json.loads(written).keys() == {"stdout"}
        assert json.loads(last) == {"code": 0, "ended": ""}


def test_requests_that_lack_something(serving: Callable[..., Any]) -> None:
    with serving() as node:
        one = node.start()
        for path, body, said in LACKING:
            answer = one.ask(path, **body)
            assert (answer.status_code, said in answer.json()["error"]) == (400, True), (path, body, answer.text)
        assert one.run("echo on")[1] == "on\n"


def test_what_does_not_start(serving: Callable[..., Any]) -> None:
    with serving(most=1) as node:
        for body, said in (
            ({"image": "other"}, "no image 'other'"),
            ({"image": "tny"}, "did you mean tiny?"),
            ({"image": "tiny", "snapshot": "0" * 64}, "no snapshot"),
            ({}, "image: expected str"),
        ):
            answer = node.ask("/start", **body)
            assert (answer.status_code, said in answer.json()["error"]) == (400, True), answer.text
        assert node.start().run("echo on")[1] == "on\n", "what did not start has no place"


def test_a_start_for_which_a_node_has_no_room_names_what_lacks(
    serving: Callable[..., Any], user: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with serving() as node:
        (scratch,) = (user / "temporary").glob("hpcrl-sandboxes-*")
        scratch.chmod(0o500)
        answer = [node.ask("/start", image="tiny") for _ in range(2)][1]
        scratch.chmod(0o700)
        said = capfd.readouterr().err
        assert said.count("/start fails here: ") == 1, said
        assert "Traceback" not in said
        assert (answer.status_code, "Permission denied" in answer.json()["error"]) == (500, True), answer.text
        assert node.start().run("echo on")[1] == "on\n"


KILLED = """
import sys
sys.path[:0] = sys.argv[1:3]
from pathlib import Path
from hpcrl.sandboxes.images import ImageStore
from hpcrl.sandboxes.node import NodeSandboxes
from hpcrl.sandboxes.snapshots import SnapshotStore
place = Path(sys.argv[3])
node = NodeSandboxes(ImageStore(place / "runs"), SnapshotStore(place / "snapshots"), 2, 600.0)
with node.use(node.start("tiny")) as one:
    program = one.sandbox.begin(["sh", "-c", "echo begun; sleep 984.25"], 600.0)
    output = program.output()  # the program ends with it
    print(next(output), flush=True)
    sys.stdin.read()
"""


@pytest.mark.usefixtures("store")
def test_a_killed_server_leaves_what_the_next_one_removes(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = python_of_users()
    temporary = user / "killed"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    command = [python, "-c", KILLED, str(ROOT), str(Path(httpx.__file__).parents[1]), str(user)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert "begun" in process.stdout.readline()
    assert count_processes("984.25")
    (left,) = temporary.iterdir()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    eventually(lambda: count_processes("984.25") == 0)
    assert left in remove_abandoned()
    assert not list(temporary.iterdir())
