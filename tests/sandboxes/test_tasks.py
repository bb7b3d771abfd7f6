"""Tasks as they are published: folders of Harbor and Terminal-Bench, rows of SWE-bench's form, their check, and how they are played."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcrl.cli.main import main
from hpcrl.config import DataConfig, EnvironmentConfig
from hpcrl.data.datasets import load_dataset
from hpcrl.data.sources import Source
from hpcrl.envs.examples import rows_of
from hpcrl.envs.terminal.folders import ImageNames, read_folder, task_folders
from hpcrl.envs.terminal.outcomes import outcomes
from hpcrl.envs.terminal.swe import Repositories, read_swe_row
from hpcrl.envs.terminal.task import TaskScript, TaskTests, TerminalTask, task_of
from hpcrl.errors import DataError
from hpcrl.sandboxes.images import ImageStore
from tests.sandboxes.material import count_processes, make_rootfs

NO_IMAGES, REPOSITORIES = ImageNames(), Repositories()


@pytest.fixture(scope="module")
def root(user: Path) -> Iterator[Path]:
    """The root of runs has an image with a repository, in which one function is wrong."""
    rootfs = make_rootfs(user / "rootfs", ("bash", "git"))
    repository = rootfs / "testbed"
    repository.mkdir()
    (repository / "double.py").write_text("def double(x):\n    return x + 2\n")
    (repository / "test_double.py").write_text("raise SystemExit('PASSED test_double.py::test_two')\n")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "begin"]):
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "safe.directory=*"]
        subprocess.run(["git", *who, *command], cwd=repository, check=True)
    with pytest.MonkeyPatch.context() as patch:
        (user / "temporary").mkdir()
        patch.setattr("tempfile.tempdir", str(user / "temporary"))
        ImageStore(user / "root").add("box", rootfs)
        yield user / "root"
        assert not list((user / "temporary").iterdir()), "a command has left something"


@pytest.fixture
def place(user: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=user))


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def harbor(folder: Path, test: str, solution: str | None = "echo yes > /answer", config: str = "") -> Path:
    write(folder, **{"task.toml": f'version = "1.0"\n{config}', "instruction.md": "Write yes into /answer.\n"})
    write(folder, **{"tests__test.sh": f"#!/bin/bash\n{test}\n", "environment__Dockerfile": "FROM python:3.12\n"})
    return write(folder, **({"solution__solve.sh": solution} if solution else {}))


GOOD = 'if [[ "$(cat /answer)" == yes ]]; then echo 1; else echo 0.5; fi > /logs/verifier/reward.txt'


def terminal_bench(folder: Path, solution: str = "echo yes > /answer") -> Path:
    config = "instruction: |-\n  Write yes\n  into /answer.\nmax_test_timeout_sec: 30.0\nparser_name: pytest\n"
    run = "python3 $TEST_DIR/cases.py\n"
    cases = "import os\nprint('PASSED' if os.path.exists('/answer') else 'FAILED', 'cases.py::test_answer')\n"
    files = {"task.yaml": config, "run-tests.sh": run, "tests__cases.py": cases, "solution.sh": solution}
    return write(folder, **files)


def swe(**more: Any) -> dict[str, Any]:
    patch = (
        "diff --git a/double.py b/double.py\n--- a/double.py\n+++ b/double.py\n@@ -1,2 +1,2 @@\n def double(x):\n"
        "-    return x + 2\n+    return 2 * x\n"
    )
    tested = (
        "diff --git a/test_double.py b/test_double.py\n--- a/test_double.py\n+++ b/test_double.py\n@@ -1 +1,4 @@\n"
        "-raise SystemExit('PASSED test_double.py::test_two')\n"
        "+from double import double\n+\n+print('PASSED' if double(2) == 4 else 'FAILED', 'test_double.py::test_two')\n"
        "+print('PASSED' if double(5) == 10 else 'FAILED', 'test_double.py::test_five')\n"
    )
    return {
        "instance_id": "a__b-1",
        "problem_statement": "double is wrong.",
        "image_name": "box",
        "patch": patch,
        "test_patch": tested,
        "FAIL_TO_PASS": '["test_double.py::test_five"]',
        "PASS_TO_PASS": ["test_double.py::test_two"],
        **more,
    }


def test_a_folder_of_harbor(tmp_path: Path) -> None:
    config = (
        '[verifier]\ntimeout_sec = 30\nenv = { A = "b" }\n[agent]\ntimeout_sec = 20.0\n[solution]\nenv = { C = "d" }\n'
        '[environment]\ndocker_image = "some/image:1.2"\n'
    )
    folder = harbor(tmp_path / "yes", GOOD, config=config)
    (folder / "tests" / "data").write_bytes(b"\xff\x00")
    task = read_folder(folder, NO_IMAGES)
    assert task.tests is not None
    assert (task.name, task.image, task.tests.command, task.tests.scoring) == (
        "yes", "some-image-1.2", "bash /tests/test.sh", "file",
    )  # fmt: skip
    assert (task.tests.seconds, task.tests.environment) == (30.0, {"A": "b"})
    assert task.tests.files == {"/tests/test.sh": f"#!/bin/bash\n{GOOD}\n".encode(), "/tests/data": b"\xff\x00"}
    assert task.solution == TaskScript(
        "bash /solution/solve.sh", {"/solution/solve.sh": b"echo yes > /answer"}, 20.0, {"C": "d"}
    )
    assert task.prompt == [{"role": "user", "content": "Write yes into /answer."}]
    assert task_of(json.loads(json.dumps(task.row()))) == task
    assert task.tests.keep == (), "the container of the agent is that of the verifier, as a rule"
    config = 'artifacts = ["/app/out", {source = "/b", destination = "c"}]\n[verifier]\nenvironment_mode = "separate"\n'
    separate = read_folder(harbor(tmp_path / "else" / "apart", GOOD, config=config), NO_IMAGES)
    assert separate.tests is not None
    assert separate.tests.keep == ("/logs/artifacts", "/app/out", "/b")
    for wrong in ("7", '"b"'):
        other = harbor(tmp_path / "else" / "apart", GOOD, config=config.replace('"/b"', wrong))
        with pytest.raises(DataError, match="expected absolute paths as `artifacts`"):
            read_folder(other, NO_IMAGES)
    chosen = ImageNames([("other", "a"), ("some/*", "b"), ("*", "c")])
    assert read_folder(folder, chosen).image == "b"
    assert [one.name for one in task_folders(tmp_path)] == ["yes"]


def test_a_folder_of_terminal_bench(tmp_path: Path) -> None:
    task = read_folder(terminal_bench(tmp_path / "yes"), NO_IMAGES)
    assert task.tests is not None
    assert sorted(task.tests.files) == ["/tests/cases.py", "/tests/run-tests.sh"]
    assert (task.tests.seconds, task.tests.environment) == (30.0, {"TEST_DIR": "/tests"})
    assert (task.prompt[0]["content"], task.image) == ("Write yes\ninto /answer.", "yes")
    assert task.solution is not None
    assert task.solution.seconds == 360.0


@pytest.mark.parametrize(
    ("files", "wrong"),
    [
        ({"task.toml": "a = "}, "task.toml: "),
        ({"task.toml": "verifier = 1"}, r"expected a table \[verifier\]"),
        ({"task.toml": "[verifier]\ntimeout_sec = 'x'", "tests/test.sh": ""}, "tests.seconds"),
        ({"task.toml": "[environment]\ndocker_image = 3"}, "expected a text as docker_image"),
        ({"task.toml": "", "instruction.md": None}, "instruction.md: No such file"),
        ({"task.yaml": "a: ["}, "task.yaml: "),
        ({"task.yaml": "instruction: 1"}, "expected a text as `instruction`"),
        ({"task.yaml": "[" * 10_000}, "task.yaml: "),
        ({"task.toml": "", "tests/test.sh": "x" * (9 << 20)}, "at most 8388608 bytes"),
    ],
)
def test_a_folder_that_is_laid_out_wrongly(tmp_path: Path, files: dict[str, str | None], wrong: str) -> None:
    for name, text in {"instruction.md": "Do it.", **files}.items():
        if text is not None:
            write(tmp_path, **{name: text})
    with pytest.raises(DataError, match=wrong):
        read_folder(tmp_path, NO_IMAGES)


@pytest.mark.parametrize("name", ["tests/key", "tests", "solution/solve.sh", "instruction.md", "task.toml"])
def test_no_link_of_a_folder_leads_out_of_it(tmp_path: Path, name: str) -> None:
    """Who publishes a folder has no file of who reads it."""
    secret = write(tmp_path / "own", key="s3cret", **{"test.sh": "s3cret"})
    folder = harbor(tmp_path / "tasks" / "a", GOOD)
    (folder / "tests" / "same.sh").symlink_to("test.sh")
    assert "/tests/same.sh" in read_folder(folder, NO_IMAGES).tests.files
    link = folder / name
    if link.is_dir():
        link.rename(folder / "other")
    link.unlink(missing_ok=True)
    link.symlink_to(secret if name == "tests" else secret / "key")
    with pytest.raises(DataError, match=rf"{name}.* is a link out of"):
        read_folder(folder, NO_IMAGES)


@pytest.mark.parametrize(
    ("more", "wrong"),
    [
        ({}, "a__b-1: expected a column `test_cmd`"),
        ({"test_cmd": "x", "base_commit": "; rm -rf /"}, "expected a commit"),
        ({"test_cmd": "x", "workdir": "testbed"}, "expected an absolute path as `workdir`"),
        ({"test_cmd": "x", "FAIL_TO_PASS": "[1]"}, "a list of names as `FAIL_TO_PASS`"),
        ({"test_cmd": "x", "FAIL_TO_PASS": "["}, "a list of names as `FAIL_TO_PASS`"),
        ({"test_cmd": "x", "patch": 3}, "a text as `patch`"),
    ],
)
def test_a_row_of_swe_bench_that_lacks_something(more: dict[str, Any], wrong: str) -> None:
    with pytest.raises(DataError, match=wrong):
        read_swe_row(swe(**more), NO_IMAGES, REPOSITORIES)


def test_commands_of_rows_of_swe_bench() -> None:
    def last(repositories: Repositories = REPOSITORIES, **more: Any) -> str:
        task = read_swe_row(swe(**more), NO_IMAGES, repositories)
        assert task.tests is not None
        return task.tests.command.splitlines()[-1]

    assert last(test_cmd="run {files} now") == "run test_double.py now"
    assert last(test_cmd=["a", "b"]) == "b"
    assert last(install_config={"test_cmd": "run -rA"}) == "run -rA test_double.py"
    assert last(Repositories("/x", "all")) == "all"
    task = read_swe_row(swe(test_cmd="a", base_commit="0" * 40), NO_IMAGES, REPOSITORIES)
    assert (task.setup, task.directory) == (f"git reset --quiet --hard {'0' * 40}", "/testbed")
    assert task.tests is not None
    assert task.tests.keep == ("/testbed",)


CASES = """
import unittest, pytest

def test_good(): pass
def test_bad(): assert 1 == 2, "a - b"
@pytest.mark.parametrize("x", ["a b", "c - d"])
def test_many(x): assert x == "a b" or x == "c - d"
@pytest.mark.skip
def test_left(): pass
@pytest.mark.xfail
def test_known(): assert False
@pytest.fixture
def broken(): raise ValueError
def test_error(broken): pass

class Of(unittest.TestCase):
    def test_good(self): pass
    def test_bad(self): self.fail()
    @unittest.skip("later")
    def test_left(self): pass
"""


def test_outcomes_of_real_programs(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(CASES)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    found = {}
    for name, command in {
        "summary": ["pytest", "-rA", "--color=yes"],
        "verbose": ["pytest", "-v", "-rN"],
        "unittest": ["unittest", "-v", "test_it"],
    }.items():
        command = [
            sys.executable,
            "-m",
            *command,
            *(["-p", "no:xdist", "-p", "no:cacheprovider"] if name != "unittest" else []),
        ]
        done = subprocess.run(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        found[name] = outcomes(done.stdout)
    expected = {
        "test_it.py::test_good": True, "test_it.py::test_bad": False, "test_it.py::test_many[a b]": True,
        "test_it.py::test_many[c - d]": True, "test_it.py::test_known": True, "test_it.py::test_error": False,
        "test_it.py::Of::test_good": True, "test_it.py::Of::test_bad": False,
    }  # fmt: skip
    assert found["summary"] == expected
    assert found["verbose"] == expected
    assert sorted(found["unittest"].values()) == [False, True]


def test_output_of_a_policy_is_read_in_linear_time() -> None:
    begun = time.thread_time()
    assert outcomes("a::" * 60_000) == {}
    assert outcomes("PASSED " + "a:" * 60_000 + "\n" + "x ... ok " * 60_000 + "y") == {}
    assert time.thread_time() - begun < 10


def test_check_names_the_broken_tasks(root: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tasks = place / "tasks"
    harbor(tasks / "a-good", GOOD)
    harbor(tasks / "b-unsolved", GOOD, None)
    harbor(tasks / "c-easy", "echo 1 > /logs/verifier/reward.txt")
    harbor(tasks / "d-wrong", GOOD, "echo no > /answer")
    harbor(tasks / "e-failing", GOOD, "echo why; exit 3")
    harbor(tasks / "f-silent", "echo nothing")
    harbor(tasks / "g-image", GOOD)
    (harbor(tasks / "h-tests", GOOD) / "tests" / "test.sh").unlink()
    (harbor(tasks / "i-layout", GOOD) / "task.toml").write_text("=")
    terminal_bench(tasks / "j-bench")
    harbor(tasks / "k-windows", GOOD, "echo yes > /answer\r\n")
    rows = swe(test_cmd="python3 {files}"), {}, swe(test_cmd="python3 {files}", workdir="/nowhere")
    (place / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = ["--image", "g-*=other", "--image", "*=box", "--root", str(root), "-j", "2"]
    code = main(["env", "check", str(tasks), str(place / "rows.jsonl"), *options])
    lines = [line.rpartition(",")[0] for line in capsys.readouterr().out.splitlines()]
    assert code == 1
    for line, expected in zip(
        lines,
        [
            "ok        a-good: 1 with its solution, 0.5 without",
            "unsolved  b-unsolved: it has no reference solution, 0.5 without one",
            "broken    c-easy: its tests pass without a solution",
            "broken    d-wrong: its tests give 0.5, not 1, with its solution: ",
            "broken    e-failing: its solution ended with exit code 3: why",
            "broken    f-silent: its tests leave no reward with its solution, a number in /logs/verifier/reward.txt, or in reward.json as `reward` or alone: nothing",
            "broken    g-image: ",
            "broken    h-tests: it has no tests; expected tests/test.sh",
            "broken    i-layout: ",
            "ok        j-bench: 1 with its solution, 0 without",
            "broken    k-windows: its tests give 0.5, not 1, with its solution: ",
            "ok        a__b-1: 1 with its solution, 0 without",
            "broken    ",
            "broken    a__b-1: its solution ended with exit code 127: /nowhere: No such file or directory",
            "14 tasks: 10 broken",
        ],
        strict=True,
    ):
        assert line.startswith(expected)
    assert "there is no image 'other'" in lines[6]
    assert "/solution/solve.sh has Windows line ends" in lines[10]


def test_an_interrupted_check_ends_with_its_sandboxes(root: Path, place: Path) -> None:
    harbor(place / "tasks" / "a", "sleep 209.25")

    def interrupt() -> None:
        while not count_processes("sleep\000209.25") and not ended.wait(0.1):
            pass
        if not ended.is_set():
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    ended, begun = threading.Event(), time.monotonic()
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        assert main(["env", "check", str(place / "tasks"), "--image", "*=box", "--root", str(root)]) == 130
    finally:
        ended.set()
        thread.join()
    assert time.monotonic() - begun < 150
    assert not count_processes("sleep\000209.25")


def test_rows_are_a_dataset_that_can_be_played(
    root: Path, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks, data = place / "tasks", place / "rows.jsonl"
    harbor(tasks / "a", GOOD, config="[verifier]\ntimeout_sec = 60\n")
    terminal_bench(tasks / "b")
    assert main(["env", "rows", str(tasks), "--image", "*=box"]) == 0
    data.write_text(capsys.readouterr().out)
    assert main(["env", "rows", str(data), "--image", "a=other", "--image", "bo?=third"]) == 0
    assert [json.loads(row)["image"] for row in capsys.readouterr().out.splitlines()] == ["other", "third"]
    prompts = load_dataset([Source(str(data))], ("train",), DataConfig(train_data=[]), EnvironmentConfig(), 4)
    assert [prompt.env_class for prompt in prompts] == ["sandbox", "sandbox"]
    typed = '<tool_call>{"name": "shell", "arguments": {"command": "echo yes > /answer; pwd"}}</tool_call>\n\nDone.\n'
    for sample in ("0", "1"):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(typed.encode())))
        assert main(["env", "try", "sandbox", "--data", str(data), "--sample", sample, "--root", str(root)]) == 0
        shown = capsys.readouterr().out
        assert "[tool]\n/\n" in shown
        assert "done after 2 turns, total reward 1\n" in shown


def test_a_folder_of_tasks_is_no_dataset(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    harbor(place / "tasks" / "a", GOOD)
    for folder in (place / "tasks", place / "tasks" / "a"):
        assert main(["env", "try", "sandbox", "--data", str(folder)]) == 4
        assert f"`hpcrl env rows {folder} > tasks.jsonl`" in capsys.readouterr().err


def test_an_example_row_is_a_whole_task(root: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.loads(line) | {"image": "box"} for line in rows_of("sandbox").read_text().splitlines()[:1]]
    (place / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert main(["env", "check", str(place / "rows.jsonl"), "--root", str(root)]) == 0
    assert capsys.readouterr().out.endswith("1 tasks: 0 broken, 0 without a reference solution\n")


def test_a_task_without_tests_has_a_row() -> None:
    task = TerminalTask("a", "Do it.", "box", tests=TaskTests("true"))
    assert task.row()["prompt"] == [{"role": "user", "content": "Do it."}]
