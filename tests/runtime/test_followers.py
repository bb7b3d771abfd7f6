"""Processes that go along with a run end when they are told, or are ended. They are real ones."""

from __future__ import annotations

import os
import time
from pathlib import Path

from hpcrl.rundir.layout import Run
from hpcrl.runtime.followers import Followers

ENDLESS = ("timeit", "-n1", "-r1", "import time; print('begun', flush=True); time.sleep(600)")
UNTIL_TOLD = ("timeit", "-n1", "-r1", "import sys; sys.stdin.read(); print('told', flush=True)")


def test_one_that_takes_too_long_or_is_hurried_is_killed(tmp_path: Path) -> None:
    run, hurried = Run(tmp_path), list[float]()
    for patience_s, hurry in ((0.0, lambda: False), (600.0, lambda: len(hurried) > 2)):
        followers = Followers(run, 1, {"endless": ENDLESS}, niceness=5)
        followers.start()
        (process,) = followers.processes
        while "begun" not in run.log(1, "endless").read_text():
            time.sleep(0.05)
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == os.getpriority(os.PRIO_PROCESS, 0) + 5
        began = time.monotonic()
        followers.end(patience_s, lambda hurry=hurry: hurried.append(0.0) or hurry())
        assert time.monotonic() - began < 10
        assert process.returncode == -9
        run.log(1, "endless").unlink()


def test_all_learn_that_nothing_more_comes_and_have_their_time(tmp_path: Path) -> None:
    run = Run(tmp_path)
    followers = Followers(run, 1, {"one": UNTIL_TOLD, "two": UNTIL_TOLD})
    followers.start()
    followers.end(60.0)
    assert [process.returncode for process in followers.processes] == [0, 0]
    assert all("told" in run.log(1, name).read_text() for name in ("one", "two"))


def test_none_that_were_not_started_are_waited_for(tmp_path: Path) -> None:
    Followers(Run(tmp_path), 1, {"endless": ENDLESS}).end(60.0)
