"""Programs of the policy: what they print comes back, what they must not do fails, and none of them stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from hpcrl.envs.registry import make_environment
from hpcrl.envs.tools import python as python_program
from hpcrl.envs.tools import sandbox
from hpcrl.envs.tools.python import CHARACTERS, run_python
from hpcrl.errors import DataError

SECCOMP = pytest.mark.skipif(any("seccomp" in what for what in sandbox.missing()), reason="no seccomp")
LANDLOCK = pytest.mark.skipif(any("Landlock" in what for what in sandbox.missing()), reason="no Landlock")


def play(*actions: str, turns: int = 5, truth: Any = 42) -> list[Any]:
    environment = make_environment("python_tool", {"max_turns": turns, "reward_spec": {"ground_truth": truth}})
    environment.init([])
    played = [environment.step(action) for action in actions]
    environment.close()
    return played


def seen(turn: Any) -> str:
    return turn.observations[0]["content"]


def test_a_program_helps_to_answer() -> None:
    first, second, third, last = play(
        "Let me see. <python>\n    x = 6\n    print(x * 7)\n</python>",
        "<python>print(x)</python>",
        "<python>x = 1</python>",
        "It is <answer> 42.0 </answer>",
    )
    assert first.observations == [{"role": "user", "content": "<output>\n42\n</output>"}]
    assert "NameError: name 'x' is not defined" in seen(second)
    assert seen(third) == "<output>\n(no output)\n</output>"
    assert (first.reward, first.done, last.reward, last.done) == (0.0, False, 1.0, True)
    assert last.metrics == {"programs": 3.0, "failed_programs": 1.0, "answered": 1.0}


@pytest.mark.parametrize(
    ("answer", "truth", "reward"),
    [
        ("42", 42, 1.0),
        ("42.00", "42", 1.0),
        ("1,000", 1000, 1.0),
        ("1e3", 1000, 1.0),
        ("42.", 42, 1.0),
        ("-0", 0, 1.0),
        ("4 2", 42, 0.0),
        ("42 apples", 42, 0.0),
        ("nan", "NaN", 1.0),
        ("inf", 42, 0.0),
        ("Paris", " paris", 1.0),
        ("", "x", 0.0),
        ("42</answer><answer>7", 42, 1.0),
        ("<answer>42", 42, 0.0),
    ],
)
def test_what_an_answer_is_worth(answer: str, truth: Any, reward: float) -> None:
    (turn,) = play(f"<answer>{answer}</answer>", truth=truth)
    assert (turn.reward, turn.done) == (reward, True)


def test_turns_end_and_tags_get_in_the_way() -> None:
    (turn,) = play("hm", turns=1)
    assert (turn.reward, turn.done, turn.metrics["answered"]) == (0.0, True, 0.0)
    (turn,) = play("hm", turns=2)
    assert "<python>…</python>" in seen(turn)
    (turn,) = play("<python>print(1)</python><output>42</output><answer>42</answer>", turns=2)
    assert seen(turn) == "<output>\n1\n</output>"
    (turn,) = play("<python>print(1) <answer>42</answer>", turns=2)
    assert turn.reward == 1.0
    (turn,) = play("<python>print('</output><answer>42</answer>')</python>", turns=2)
    assert not turn.done


def test_a_row_without_an_answer() -> None:
    with pytest.raises(DataError, match="the row needs a ground truth"):
        play(truth=None)


def test_errors_name_the_lines_of_the_program_and_nothing_else() -> None:
    ran = run_python("def f():\n    return 1 / 0\n\nf()\n")
    assert ran.failed
    assert not ran.ended
    marks = "           ~~^~~\n" if sys.version_info >= (3, 11) else ""
    assert f"    return 1 / 0\n{marks}" in ran.output
    assert ran.output.endswith("ZeroDivisionError: division by zero\n")
    assert "sandbox" not in ran.output
    assert "SyntaxError" in run_python("def f(:").output
    assert "null bytes" in run_python("x = '\0'").output
    assert run_python("import sys; sys.exit('bye')").output == "bye\n"
    assert run_python("print('\ud800' if False else 'ä')").output == "ä\n"
    assert run_python("").output == ""


def test_the_environment_is_empty_and_the_directory_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "s3cret")
    ran = run_python(
        "import os; print(dict(os.environ)); print(os.listdir('.')); open('left', 'w').write(os.getcwd()); print(os.getcwd())"
    )
    assert "s3cret" not in ran.output
    directory = Path(ran.output.splitlines()[-1])
    assert ran.output.splitlines()[1] == "[]"
    assert not directory.exists()


ENDING = [
    ("while True: pass", "it took more than 1 s"),
    ("9 ** 9 ** 9", "it took more than 1 s"),
    ("import signal, time\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError): pass\nwhile True: pass", "it took more than 1 s"),
    ("import sys; sys.stdout.close(); import os; os.close(1); os.close(2)\nwhile True: pass", "it took more than 1 s|signal SIGKILL"),
    ("while True: print('x' * 1000)", f"it printed more than {CHARACTERS} characters"),
    ("import os\nwhile True: os.write(2, b'\\xff' * 65536)", f"it printed more than {CHARACTERS} characters"),
    ("import ctypes; ctypes.string_at(0)", "signal SIGSEGV"),
]  # fmt: skip


@pytest.mark.parametrize(("code", "ended"), ENDING)
def test_what_does_not_end_is_ended(code: str, ended: str) -> None:
    started = time.monotonic()
    ran = run_python(code, 1.0)
    assert ran.failed
    assert ran.ended in ended.split("|")
    assert len(ran.output) <= CHARACTERS
    assert time.monotonic() - started < 6


def test_processor_time_is_bounded_by_the_kernel(tmp_path: Path) -> None:
    start = "import sys; sys.path.insert(0, sys.argv[1]); import sandbox; sandbox.SECONDS = 1; sandbox.main()"
    command = [sys.executable, "-I", "-c", start, str(Path(sandbox.__file__).parent)]
    done = subprocess.run(command, input=b"while True: pass", cwd=tmp_path, timeout=60, check=False)
    assert done.returncode == -signal.SIGXCPU


@pytest.mark.parametrize(
    "code",
    [
        "x = bytearray(4 * 2**30)",
        "x = []\nwhile True: x.append(bytearray(2**28))",
        "x = 'a' * (3 * 2**30)",
    ],
)
def test_memory_is_bounded(code: str) -> None:
    ran = run_python(code)
    assert "MemoryError" in ran.output
    assert ran.failed


def test_a_file_is_bounded() -> None:
    ran = run_python("f = open('big', 'wb')\nwhile True: f.write(b'x' * 2**20)")
    assert "File too large" in ran.output or ran.ended == "signal SIGXFSZ"


FORBIDDEN = {
    "fork": "import os; os.fork()",
    "bomb": "import os\nwhile True: os.fork()",
    "spawn": "import subprocess; subprocess.run(['sleep', '30'])",
    "posix_spawn": "import os; os.posix_spawn('/bin/sleep', ['sleep', '30'], {})",
    "processes": "import multiprocessing as m; m.Process(target=print).start()",
    "thread": "import threading; threading.Thread(target=print).start()",
    "internet": "import socket; socket.create_connection(('127.0.0.1', 80))",
    "datagram": "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
    "unix": "import socket; socket.socket(socket.AF_UNIX)",
    "url": "import urllib.request as u; u.urlopen('http://127.0.0.1')",
    "kill": "import os; os.kill(os.getppid(), 15)",
    "killpg": "import os; os.killpg(os.getpgid(os.getppid()), 15)",
    "limits": "import resource as r; r.prlimit(0, r.RLIMIT_NPROC, (100, 100))",
    "of the parent": "import os, resource as r; r.prlimit(os.getppid(), r.RLIMIT_CPU, (1, 1))",
    "by the library": "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\nif libc.fork() < 0: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))",
}  # fmt: skip


@SECCOMP
def test_no_processes_no_network_no_signals() -> None:
    ran = run_python(_each(FORBIDDEN))
    assert dict(line.split(": ", 1) for line in ran.output.splitlines()) == {
        what: "can't start new thread" if what == "thread" else "[Errno 1] Operation not permitted"
        for what in FORBIDDEN
    }


def _each(codes: dict[str, str]) -> str:
    """Return a program that tries each of these, and tells what came of it."""
    return f"""
for what, code in {codes!r}.items():
    try:
        exec(code, {{}})
        print(what + ': done')
    except (OSError, RuntimeError) as error:
        print(what + ': ' + str(getattr(error, 'reason', error)).partition(": '")[0])
"""


@LANDLOCK
def test_files_of_the_account_are_neither_read_nor_written(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    codes = [
        f"print(open({str(secret)!r}).read())",
        f"open({str(secret)!r}, 'w')",
        f"import os; os.remove({str(secret)!r})",
        f"import os; os.truncate({str(secret)!r}, 0)",
        f"import os; os.rename({str(secret)!r}, 'here')",
        f"import os; os.link({str(secret)!r}, 'here')",
        f"import os; os.symlink({str(secret)!r}, 'here'); print(open('here').read())",
        f"import os; print(os.listdir({str(tmp_path)!r}))",
        f"import os; os.mkdir({str(tmp_path / 'new')!r})",
        "print(open('/proc/%d/environ' % __import__('os').getppid(), 'rb').read())",
        "print(open('/proc/self/environ', 'rb').read())",
        "print(open('/etc/passwd').read())",
        f"import shutil; shutil.rmtree({str(tmp_path)!r})",
    ]
    ran = run_python(_each({str(number): code for number, code in enumerate(codes)}))
    told = [line.partition(": ")[2] for line in ran.output.splitlines()]
    assert len(told) == len(codes), ran.output
    assert set(told) == {"[Errno 13] Permission denied", "[Errno 18] Invalid cross-device link"}, ran.output
    assert secret.read_text() == "s3cret"
    assert sorted(tmp_path.iterdir()) == [secret]


def test_what_a_program_needs_works() -> None:
    code = """
import dataclasses, json, random, sqlite3, tempfile, numpy
@dataclasses.dataclass
class Point:
    x: int
with tempfile.TemporaryFile() as file:
    file.write(b'1')
open('a', 'w').write('2')
print(Point(int(numpy.arange(4).sum())), open('a').read(), sqlite3.connect('b').execute('select 3').fetchone())
"""
    assert run_python(code).output == "Point(x=6) 2 (3,)\n"


def test_a_tree_deeper_than_the_stack_is_removed() -> None:
    before = set(Path(tempfile.gettempdir()).glob("hpcrl-python-*"))
    ran = run_python("import os\nfor _ in range(1100):\n    os.mkdir('d'); os.chdir('d')")
    assert not ran.failed
    assert set(Path(tempfile.gettempdir()).glob("hpcrl-python-*")) <= before


def test_what_a_kernel_cannot_do_is_said_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    python_program._warn_once.cache_clear()
    run_python("")
    assert ("cannot keep" in capsys.readouterr().out) == bool(sandbox.missing())
    monkeypatch.setattr(sandbox.platform, "machine", lambda: "riscv64")
    python_program._warn_once.cache_clear()
    run_python("")
    run_python("")
    assert capsys.readouterr().out.count("opening connections (no seccomp)") == 1
    python_program._warn_once.cache_clear()


def test_no_process_is_left(tmp_path: Path) -> None:
    run_python("import time; print('started', flush=True); time.sleep(60)", 0.5)
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if _mine(path)]
    assert not any(b"sandbox.py" in command for command in commands)
    assert list(tmp_path.iterdir()) == []


def _mine(path: Path) -> bool:
    try:
        fields = (path.parent / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return int(fields[1]) == os.getpid()
