"""Programs of the policy: what they print comes back, what they must not do fails, and none of them stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config.sections.environment import PythonToolConfig, SkyRLGymConfig
from hpcrl.envs.registry import make_environment
from hpcrl.envs.tools import python as python_program
from hpcrl.envs.tools.python import CHARACTERS, lacking, run_python
from hpcrl.errors import ConfigError, DataError
from tests.envs.sandbox.material import without_namespaces
from tests.paths import ROOT


def play(*actions: str, turns: int = 5, truth: Any = 42, required: bool = True) -> list[Any]:
    gym = SkyRLGymConfig(python_tool=PythonToolConfig(require_sandbox=required))
    environment = make_environment(
        "python_tool", {"max_turns": turns, "reward_spec": {"ground_truth": truth}, "skyrl_gym": gym}
    )
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
    ran = run_python(code, 1.0 if "1 s" in ended else 30.0)  # other tests have the cores
    assert ran.failed
    assert ran.ended in ended.split("|")
    assert len(ran.output) <= CHARACTERS
    assert time.monotonic() - started < 30


def test_processor_time_is_bounded_by_the_kernel(tmp_path: Path) -> None:
    start = "import sys; sys.path.insert(0, sys.argv[1]); from hpcrl.envs.sandbox import program; program.SECONDS = 1; program.main()"
    command = [sys.executable, "-I", "-c", start, str(ROOT)]
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


@pytest.mark.skipif(bool(lacking()), reason="without namespaces nobody counts all files together, as `lacking` says")
def test_a_full_directory_fills_nothing_else() -> None:
    code = "for n in range(99):\n    open(f'f{n}', 'wb').write(bytes(15 << 20))"
    assert "No space left on device" in run_python(code).output
    assert "No space left on device" in run_python("for n in range(9999): open(f'f{n}', 'w').close()").output


def test_a_node_that_cannot_confine_programs_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(python_program, "_COMMAND", [*without_namespaces(), *python_program._COMMAND])
    lacking.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"cannot keep .*no user namespaces.*require_sandbox=false"):
            play("<python>print(1)</python>")
        capsys.readouterr()
        for _ in range(2):
            assert seen(play("<python>print(1)</python>", required=False)[0]) == "<output>\n1\n</output>"
        assert capsys.readouterr().out.count("no user namespaces") == 1
    finally:
        lacking.cache_clear()


def test_no_process_is_left(tmp_path: Path) -> None:
    run_python("import time; print('started', flush=True); time.sleep(60)", 0.5)
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if _mine(path)]
    assert not any(b"envs.sandbox.program" in command for command in commands)
    assert list(tmp_path.iterdir()) == []


def _mine(path: Path) -> bool:
    try:
        fields = (path.parent / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return int(fields[1]) == os.getpid()
