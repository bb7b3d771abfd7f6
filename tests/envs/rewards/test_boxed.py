"""boxed_math: which answer of a text counts, what a ground truth is read as, and processes that compare."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hpcrl.config import EnvironmentConfig
from hpcrl.envs.rewards import boxed
from hpcrl.envs.rewards.response import Response
from hpcrl.envs.rewards.weighted import REWARDS
from hpcrl.errors import HpcrlError, UserCodeError

ENVIRONMENT = EnvironmentConfig()


def value(text: str, ground_truth: Any) -> float:
    return REWARDS["boxed_math"](Response(text=text, ground_truth=ground_truth), ENVIRONMENT)


@pytest.mark.parametrize(
    ("text", "truth", "expected"),
    [
        (r"so \boxed{\frac{1}{2}}", r"\boxed{0.5}", 1),
        (r"\boxed{\frac12}", r"\frac{1}{2}", 1),
        (r"\boxed{x+1}", "$1+x$", 1),
        ("therefore it is 12", 12, 1),
        ("", "$12$", 0),
        (r"\boxed{13}", "12", 0),
        (r"\boxed{-12}", "12", 0),
        (r"\boxed{1,234,567}", "1234567", 1),
        (r"\boxed{\{3, 1, 2\}}", r"\{1,2,3\}", 1),
        (r"\boxed{(2, 1)}", "(1, 2)", 0),
        (r"\boxed{10^{400}}", "10^{400}", 1),
        (r"\boxed{10^{400}+1}", "10^{401}", 0),
        (r"\boxed{\frac{1}{", "1", 0),
        (r"\boxed{\boxed{7}}", "7", 1),
        (r"\frac" * 3000, "7", 0),
        ("\\boxed{\n7\n}", "7", 1),
        (r"\boxed{\left(\frac{3}{2}, -13\right)}", r"\left( \frac{3}{2}, -13 \right)", 1),
        (r"\boxed{\frac{3}{2}}", r"\left( \frac{3}{2}, -13 \right)", 0),
        (r"\boxed{\frac{11}{2}}", r"5\frac{1}{2}", 1),
        (r"\boxed{\frac{1}{2}}", r"5\frac{1}{2}", 0),
        (r"\boxed{\frac{11}{2}}", r"$5\frac{1}{2}$", 1),
        (r"\boxed{0.5}", r"So it is $\frac{1}{2}$.", 1),
        (r"\boxed{5}", r"First $x = \boxed{4}$, then $y = \boxed{5}$", 1),
        (r"\boxed{\frac{2}{3}}", r"10\frac{2}{3}\%", 0),
        (r"\boxed{10\frac{2}{3}\%}", r"10\frac{2}{3}\%", 1),
        (r"\boxed{42}", "42.", 1),
        (r"\boxed{4}. Wait, that is wrong. It is \boxed{5}.", "5", 1),
        (r"\boxed{4}. Wait, that is wrong. It is \boxed{5}.", "4", 0),
        (r"\boxed{5}, no: \boxed{4", "5", 0),
        (r"$\boxed{2}$ and $\boxed{5}$", "2, 5", 1),
        (r"$\boxed{2}$ or $\boxed{5}$", "5", 0),
        (r"<think>\boxed{3}?</think> \boxed{5}", "5", 1),
        (r"<think>\boxed{5}</think> I do not know.", "5", 0),
        (r"<think>It may be \boxed{5}, or", "5", 0),
        (r"\boxed{3}", r"$3$ or $4$", 0),
        (r"\boxed{3, 4}", r"\(3\) or \(4\)", 1),
        (r"\boxed{5}", "$$5$$", 1),
        # as people write it, and not LaTeX
        ("The answer is \N{MINUS SIGN}5.", "-5", 1),
        ("\\boxed{\N{MINUS SIGN}5}", "\N{MINUS SIGN}5", 1),
        (r"\boxed{10 000}", "10000", 1),
        (r"\boxed{10 000}", "0", 0),
        (r"\boxed{10\,000}", "10,000", 1),
        (r"\boxed{10000}", "10 000", 1),
        (r"\boxed{1\ 234\ 567}", "1234567", 1),
        (r"\boxed{1 1/2}", "1.5", 1),
        (r"\boxed{\frac{1}{2}}", "1 1/2", 0),
        (r"\boxed{1 1/2}", r"1\frac{1}{2}", 1),
        (r"\boxed{3/4}", r"\dfrac{3}{4}", 1),
        (r"\boxed{30°}", "30", 1),
        (r"\boxed{30\degree}", r"30^\circ", 1),
        (r"\boxed{√2}", r"\sqrt{2}", 1),
        (r"\boxed{x²}", "x^2", 1),
        (r"\boxed{½}", "0.5", 1),
        (r"\boxed{5 dollars}", "5", 1),
        (r"\boxed{5 miles per hour}", "5", 1),
        (r"\boxed{€5}", "5", 1),
        (r"\boxed{10}", "10 dollars", 1),
        (r"\boxed{1 or 2}", "1, 2", 1),
    ],
)
def test_boxed_math(text: str, truth: Any, expected: float) -> None:
    assert value(text, truth) == expected


def test_a_ground_truth_that_cannot_be_read_costs_its_samples_and_not_the_run() -> None:
    with pytest.raises(UserCodeError, match="expected a formula or a number as ground truth"):
        value(r"\boxed{7}", r"\boxed{}")


def test_boxed_math_in_many_threads() -> None:
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda n: value(rf"\boxed{{{n % 3} + {n}}}", n + 1), range(60)))
    assert found == [float(n % 3 == 1) for n in range(60)]


def test_an_answer_that_takes_for_ever_is_wrong_after_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next comparison is none the worse for it."""
    monkeypatch.setattr(boxed, "SECONDS", 2.0)
    monkeypatch.setattr(boxed, "_COMPARERS", boxed._Comparers())
    assert value(r"\boxed{7}", "7") == 1
    started = time.monotonic()
    assert value(r"\boxed{9^{9^{9^{9}}}}", "7") == 0
    assert time.monotonic() - started > 1.5
    assert value(r"\boxed{7}", "7") == 1


def test_a_slow_machine_makes_no_answer_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boxed, "SECONDS", 1.0)
    comparers = boxed._Comparers()
    assert comparers.same("7", "7")
    (process,) = comparers._idle
    started = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(comparers.same, "(x+y+z)^{9}-1", r"\boxed{(x+y+z)^{8}(x+z+y)-1}")
        while not found.done():
            process.send_signal(signal.SIGSTOP)
            time.sleep(0.25)
            process.send_signal(signal.SIGCONT)
            time.sleep(0.02)
    assert found.result() is True
    assert time.monotonic() - started > 1.0


def test_a_process_that_died_while_nothing_was_asked_is_no_wrong_answer() -> None:
    comparers = boxed._Comparers()
    assert comparers.same("7", "7")
    comparers._idle[0].kill()
    comparers._idle[0].wait()
    assert comparers.same("7", "7") is True


def test_a_signal_to_the_group_is_no_wrong_answer() -> None:
    """As Ctrl-C, or the end of a job: it comes while the answer is awaited."""
    comparers = boxed._Comparers()
    assert comparers.same("7", "7")
    (process,) = comparers._idle
    process.send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(comparers.same, "7", "7")
        time.sleep(0.1)
        for one in (signal.SIGTERM, signal.SIGINT, signal.SIGCONT):
            process.send_signal(one)
        assert found.result() is True
    assert comparers._idle == [process]


def test_a_question_that_did_not_arrive_is_asked_again() -> None:
    deaf = subprocess.Popen(
        ["sh", "-c", "exec 0<&-; echo; exec sleep 0.5"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert deaf.stdout is not None
    deaf.stdout.readline()
    comparers = boxed._Comparers()
    comparers._idle.append(deaf)
    assert comparers.same("7", "7") is True
    assert deaf not in comparers._idle


def test_a_comparison_that_cannot_start_is_an_error_and_not_a_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boxed, "SECONDS", "soon")
    monkeypatch.setattr(boxed, "_COMPARERS", boxed._Comparers())
    with pytest.raises(HpcrlError, match="is math-verify whole"):
        value(r"\boxed{7}", "7")


@pytest.mark.parametrize("asked", ['["7", "7"]\n', '["7", "'], ids=["whole", "half a question"])
def test_one_whose_asker_was_killed_ends_quietly(asked: str) -> None:
    """The answer has no reader any more."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "hpcrl.envs.rewards.compare", "60"]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        assert process.stdout.readline() == "\n"
        process.stdout.close()
        process.stdin.write(asked)
        process.stdin.close()
        assert process.stderr.read() == ""
