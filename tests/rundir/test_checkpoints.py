"""Whatever line a writer dies at and whoever else is still alive: there is a whole checkpoint, and the newest one is used."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcrl import faults as fault
from hpcrl.errors import CommitError
from hpcrl.rundir.checkpoints import Report, Retention, line_of, newest_usable, retire, set_aside_after, size_of
from hpcrl.rundir.commit import (
    COMMIT,
    Fence,
    begin,
    committed_by,
    committed_directory,
    discard,
    finish,
    unfenced,
    verify,
    write_text,
)
from hpcrl.rundir.evaluations import begun_evaluations
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import Kind, open_attempt, report_outcome, require_newest
from hpcrl.rundir.space import explained, require_space
from hpcrl.rundir.starts import failed_loads, note, read_starts
from hpcrl.runtime.process_status import StatusWriter, read_process_statuses
from hpcrl.units import readable_size

NEW = {"committed", "retire", "trash"}
POINTS = ["begin", "written", "manifest", "renamed", "synced", *sorted(NEW)]
RETENTIONS = [Retention(2), Retention(1), Retention(2, every=20), Retention(2, metric="reward"), Retention()]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    (tmp_path / "config.toml").touch()
    return Run.open(tmp_path)


def save(run: Run, *steps: int, attempt: int = 1, fence: Fence = unfenced) -> None:
    for step in steps:
        with committed_directory(run.checkpoint(step), attempt, fence=fence, step=step) as directory:
            (directory / "model").write_text(f"{step} by {attempt}")


def names(run: Run) -> list[str]:
    return sorted(path.name for path in run.checkpoints.iterdir() if path.is_dir())


def start(run: Run, attempt: int) -> tuple[Path | None, list[str]]:
    """Do what the trainer does when an attempt starts."""
    said: list[str] = []
    found = newest_usable(run, attempt, said.append)
    set_aside_after(run, attempt, found, lambda: require_newest(run, attempt), said.append)
    note(run, {"attempt": attempt, "from": found.name if found else None})
    return found, said


def dies(point: str, what: Callable[[], None]) -> bool:
    """Run `what` in a process that is killed at a fault point; return whether it was."""
    child = os.fork()
    if child == 0:
        try:
            fault._passed.clear()
            os.environ["HPCRL_FAULT"] = f"{point}:kill"
            what()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert killed or status == 0
    return killed


@pytest.mark.parametrize("retention", RETENTIONS, ids=lambda r: f"newest {r.newest} every {r.every} best {r.metric}")
def test_killed_at_each_point(tmp_path: Path, retention: Retention) -> None:
    for point in POINTS:
        run = Run(tmp_path / point)
        save(run, 10, 20, 30)

        def work(run: Run = run) -> None:
            save(run, 40, attempt=2)
            retire(run, retention, {10: 0.1, 20: 0.9, 30: 0.5}, unfenced)

        killed = dies(f"commit.{point}", work)
        assert killed or (point == "trash" and retention.newest < 0)
        whole = [path for path in line_of(run) if verify(path)]
        assert len(whole) >= 2
        found, _ = start(run, 3)
        assert found == run.checkpoint(40 if point in NEW else 30), point
        assert all(name.startswith("s") for name in names(run)), "leftovers are gone"
        save(run, 40 if found == run.checkpoint(30) else 50, attempt=3)
        retire(run, retention, {}, unfenced)
        assert verify(line_of(run)[-1])["attempt"] == 3


def test_each_kind_of_directory_has_points_of_its_own(tmp_path: Path) -> None:
    def work() -> None:
        with committed_directory(tmp_path / "weights" / "v000001", 1):
            pass
        with committed_directory(tmp_path / "exports" / "s000001", 1):
            pass

    assert dies("exports.renamed", work)
    assert committed_by(tmp_path / "weights" / "v000001") == 1
    assert committed_by(tmp_path / "exports" / "s000001") is None


@pytest.mark.parametrize(
    ("retention", "kept"),
    [
        (Retention(), [10, 20, 30, 40, 50, 60]),
        (Retention(3), [40, 50, 60]),
        (Retention(1), [50, 60]),
        (Retention(2, every=20), [20, 40, 50, 60]),
        (Retention(2, metric="reward"), [20, 50, 60]),
        (Retention(2, metric="reward", mode="min"), [30, 50, 60]),
        (Retention(2, every=30, metric="reward"), [20, 30, 50, 60]),
    ],
)
def test_retention(run: Run, retention: Retention, kept: list[int]) -> None:
    save(run, 10, 20, 30, 40, 50, 60)
    begin(run.checkpoint(70), 1)
    retire(run, retention, {10: 0.5, 20: 0.9, 30: -1.0, 40: float("nan"), 55: 7.0}, unfenced)
    assert names(run) == [".tmp-s000070.1", *(f"s{step:06d}" for step in kept)], "only committed ones are deleted"


def test_a_checkpoint_inside_a_step_is_neither_best_nor_one_of_every(run: Run) -> None:
    for updates in (0, 2):
        with committed_directory(run.checkpoint(20, updates), 1):
            pass
    save(run, 30, 40)
    retire(run, Retention(2, every=20, metric="reward"), {20: 1.0}, unfenced)
    assert names(run) == ["s000020", "s000030", "s000040"]


@pytest.mark.parametrize("newest", [-1, 2, 5])
@pytest.mark.parametrize("whole", [[], [20]])
def test_checkpoints_inside_a_step_do_not_pile_up(run: Run, newest: int, whole: list[int]) -> None:
    save(run, *whole)
    for updates in range(1, 6):
        with committed_directory(run.checkpoint(20, updates), updates):
            pass
        retire(run, Retention(newest), {}, unfenced)
    assert names(run) == [f"s{step:06d}" for step in whole] + ["s000020u4", "s000020u5"]


def test_what_was_given_up_goes_after_two_newer_commits(run: Run) -> None:
    save(run, 10, 20, 30)
    (run.checkpoint(30) / "model").write_text("damaged by 1")
    begin(run.checkpoint(40), 1)
    found, said = start(run, 2)
    assert found == run.checkpoint(20)
    assert "s000030/model" in said[0]
    assert names(run) == [".given-up-s000030.2", "s000010", "s000020"]
    save(run, 30, attempt=2)
    retire(run, Retention(), {}, unfenced)
    assert ".given-up-s000030.2" in names(run)
    save(run, 40, attempt=2)
    retire(run, Retention(), {}, unfenced)
    assert names(run) == ["s000010", "s000020", "s000030", "s000040"]


@pytest.mark.parametrize("content", ["", "{}", "[1]", "not json", '{"attempt": 1}'])
def test_a_mark_that_is_none_is_damage(run: Run, content: str) -> None:
    save(run, 10, 20)
    (run.checkpoint(20) / COMMIT).write_text(content)
    found, said = start(run, 2)
    assert found == run.checkpoint(10)
    assert "COMMIT is no mark of a commit" in said[0]


class Zombie:
    """A fence of attempt 1 that lets a number of questions pass; then attempt 2 begins and does something."""

    def __init__(
        self, run: Run, passes: int, meanwhile: Callable[[], None] = lambda: None, blind: bool = False
    ) -> None:
        self._run, self._left, self._meanwhile, self._blind = run, passes, meanwhile, blind

    def __call__(self) -> None:
        if self._left == 0:
            open_attempt(self._run, "7.1", ["node-2"])
            self._meanwhile()
        self._left -= 1
        if not self._blind:
            require_newest(self._run, 1)


@pytest.fixture
def begun(run: Run) -> Run:
    open_attempt(run, "7.0", ["node-1"])
    save(run, 10, 20)
    return run


@pytest.mark.parametrize("passes", [0, 1])
def test_an_older_attempt_does_not_commit(begun: Run, passes: int) -> None:
    """Before the rename, and between the rename and the mark."""
    begin(begun.checkpoint(30), 1)
    with pytest.raises(CommitError, match=r"attempt 1 of .* writes no more: attempt 2 has begun on node-2"):
        finish(begun.checkpoint(30), 1, fence=Zombie(begun, passes))
    assert begun.checkpoint(30).exists() == (passes == 1)
    assert committed_by(begun.checkpoint(30)) is None
    save(begun, 30, attempt=2, fence=lambda: require_newest(begun, 2))
    assert verify(begun.checkpoint(30))["attempt"] == 2, "half a commit of the older one is not in the way"


def test_a_mark_that_comes_late_lands_in_its_own_directory(begun: Run) -> None:
    """Attempt 1 has asked the fence for the last time and sleeps; attempt 2 commits the same step; attempt 1 wakes."""
    begin(begun.checkpoint(30), 1)
    with pytest.raises(FileNotFoundError):
        finish(begun.checkpoint(30), 1, fence=Zombie(begun, 1, lambda: save(begun, 30, attempt=2), blind=True))
    assert verify(begun.checkpoint(30))["attempt"] == 2


def test_a_commit_beside_a_newer_attempt_is_not_used(begun: Run) -> None:
    save(begun, 30)
    (begun.checkpoint(30) / "model").unlink()
    open_attempt(begun, "7.1", ["node-2"])
    assert start(begun, 2)[0] == begun.checkpoint(20)
    save(begun, 40)  # of attempt 1, which asked its fence before attempt 2 began
    found, said = start(begun, 3) if open_attempt(begun, "7.2", ["node-2"]) else (None, [])
    assert found == begun.checkpoint(20)
    assert "s000040 was committed by attempt 1 beside attempt 2" in said[0]
    assert line_of(begun) == [begun.checkpoint(10), begun.checkpoint(20)]


def test_an_older_attempt_deletes_nothing(begun: Run) -> None:
    save(begun, 30)
    with pytest.raises(CommitError, match="writes no more"):
        retire(begun, Retention(2), {}, Zombie(begun, 0))
    assert names(begun) == ["s000010", "s000020", "s000030"], "what had left its name has it again"
    begin(begun.checkpoint(40), 2)
    with pytest.raises(CommitError, match="writes no more"):
        set_aside_after(begun, 1, begun.checkpoint(10), lambda: require_newest(begun, 1), print)
    set_aside_after(begun, 1, begun.checkpoint(30), unfenced, print)
    assert names(begun) == [".tmp-s000040.2", "s000010", "s000020", "s000030"]


def test_nothing_is_deleted_where_the_fence_cannot_be_asked(run: Run) -> None:
    save(run, 10, 20, 30)

    def fails() -> None:
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError, match="Input/output"):
        retire(run, Retention(2), {}, fails)
    assert names(run) == ["s000010", "s000020", "s000030"]


def test_what_this_attempt_has_committed_is_not_replaced(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory could not be synced once the mark was there, so it was told to have failed."""
    syncs = iter([None, None, OSError(errno.EIO, "Input/output error")])

    def sync(_: int) -> None:
        if error := next(syncs):
            raise error

    with monkeypatch.context() as patched:
        patched.setattr("hpcrl.rundir.commit._sync", sync)
        with pytest.raises(OSError, match="Input/output"):
            save(run, 10)
    before = (run.checkpoint(10) / "model").stat().st_ino
    save(run, 10)
    assert (run.checkpoint(10) / "model").stat().st_ino == before
    assert names(run) == ["s000010"]
    (run.checkpoint(10) / "model").write_text("damaged")
    with pytest.raises(CommitError, match="checksum differs"):
        save(run, 10)
    save(run, 10, attempt=2)
    with pytest.raises(CommitError, match="committed already, by attempt 2"):
        save(run, 10)


OUT_OF_MEMORY = "trainer-0: rank 3: torch.OutOfMemoryError: CUDA out of memory (log: trainer-0.log) on n1"


def fail(
    run: Run, attempt: int, kind: Kind = "failed", message: str = OUT_OF_MEMORY, report: Report = lambda _: None
) -> Path | None:
    """Start an attempt that ends while it loads what it found."""
    found = newest_usable(run, attempt, report)
    assert found is not None
    set_aside_after(run, attempt, found, unfenced, print)
    note(run, {"attempt": attempt, "loads": found.name, "by": committed_by(found)})
    report_outcome(run, attempt, kind, message, "agent-0")
    return found


def test_two_failed_loads_put_into_quarantine(run: Run) -> None:
    save(run, 10, 20)
    assert [fail(run, attempt) for attempt in (2, 3)] == [run.checkpoint(20)] * 2
    found, said = start(run, 4)
    assert found == run.checkpoint(10)
    assert "attempts 2 and 3 failed while they loaded" in said[0]
    assert names(run) == [".quarantined-s000020.4", "s000010"]
    save(run, 20, attempt=4)
    assert start(run, 5)[0] == run.checkpoint(20), "another checkpoint by the same name"


@pytest.mark.parametrize("kind", ["interrupted", "lost", "cancelled"])
def test_an_attempt_that_was_stopped_says_nothing_about_what_it_loaded(run: Run, kind: Kind) -> None:
    save(run, 10, 20)
    for attempt in (2, 3, 4):
        assert fail(run, attempt, kind) == run.checkpoint(20)
    assert failed_loads(run, read_starts(run)) == {}


@pytest.mark.parametrize(
    ("message", "counts"),
    [
        (OUT_OF_MEMORY, True),
        ("trainer-12: killed by SIGKILL (log: trainer-12.log) on n1", True),
        ("rank-3 has made no progress in phase load for 3600 s on n1; the stacks of all processes: /there", True),
        ("controller: hpcrl.errors.DataError: no file /data.parquet (log: controller.log) on n1", False),
        ("nothing was heard of n2, a node that the run needs, for 61 s", False),
        (
            "trainer-0: rank 0: hpcrl.errors.RunError: s000020 was saved without a critic (log: trainer-0.log) on n1",
            False,
        ),
    ],
)
def test_only_what_the_trainer_fails_of_speaks_against_what_it_loaded(run: Run, message: str, counts: bool) -> None:
    save(run, 10, 20)
    for attempt in (2, 3):
        fail(run, attempt, message=message)
    assert start(run, 4)[0] == run.checkpoint(10 if counts else 20)


def test_what_was_loaded_since_has_not_failed(run: Run) -> None:
    save(run, 10, 20)
    fail(run, 2)
    assert start(run, 3)[0] == run.checkpoint(20)
    fail(run, 4)
    assert start(run, 5)[0] == run.checkpoint(20)


def test_an_older_attempt_puts_nothing_into_quarantine(begun: Run) -> None:
    for attempt in (2, 3):
        assert open_attempt(begun, f"7.{attempt}", ["node-2"]).number == attempt
        fail(begun, attempt)
    open_attempt(begun, "7.4", ["node-2"])
    with pytest.raises(CommitError, match="writes no more"):
        newest_usable(begun, 1, print, fence=lambda: require_newest(begun, 1))
    assert names(begun) == ["s000010", "s000020"]


def test_quarantine_ends_where_it_does_not_help(run: Run) -> None:
    save(run, 10, 20, 30)
    said: list[str] = []
    found = [fail(run, attempt, report=said.append) for attempt in range(2, 9)]
    assert found == [run.checkpoint(step) for step in (30, 30, 20, 20, 30, 30, 30)]
    assert names(run) == ["s000010", "s000020", "s000030"]
    assert len(said) == 2
    assert ".quarantined-s000030.4 is s000030 again" in said[1]
    assert start(run, 9)[0] == run.checkpoint(30)


def test_the_last_checkpoint_is_never_put_into_quarantine(run: Run) -> None:
    save(run, 10)
    assert [fail(run, attempt) for attempt in range(2, 6)] == [run.checkpoint(10)] * 4


def test_a_record_that_was_cut_off(run: Run) -> None:
    note(run, {"attempt": 1, "from": None})
    with run.starts.open("a") as file:
        file.write('{"attempt": 2, "lo')
    note(run, {"attempt": 3, "from": None})
    assert [line["attempt"] for line in read_starts(run)] == [1, 3]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, ["No space left", "hpcrl checkpoint ls", "max_ckpts_to_keep"]),
        (errno.EDQUOT, ["quota", "hpcrl checkpoint ls"]),
        (errno.EIO, ["Input/output error", "its administrators"]),
        (errno.EROFS, ["Read-only", "its administrators"]),
    ],
)
def test_a_filesystem_that_refuses_is_explained(
    run: Run, monkeypatch: pytest.MonkeyPatch, number: int, words: list[str]
) -> None:
    for point in ("begin", "manifest", "renamed", "synced"):
        save(run, 10)
        monkeypatch.setenv("HPCRL_FAULT", f"checkpoints.{point}:raise={errno.errorcode[number]}")
        fault._passed.clear()
        with pytest.raises(CommitError) as raised, explained(run.checkpoint(20), 5 << 30):
            save(run, 20)
        for word in [
            "s000020 could not be written",
            "needs about 5.0 GiB",
            " free)",
            "Earlier commits are untouched",
            *words,
        ]:
            assert word in str(raised.value)
        assert names(run) == ["s000010"], "what is half-written is gone"
        assert size_of(verify(run.checkpoint(10))) == 7
        monkeypatch.delenv("HPCRL_FAULT")
        discard(run.checkpoint(10))


def test_too_little_space_is_seen_before_anything_is_written(tmp_path: Path) -> None:
    require_space(tmp_path / "not there yet", 1000)
    require_space(tmp_path, None)
    with pytest.raises(CommitError, match=r"too little space \(needs about 1024\.0 TiB, "):
        require_space(tmp_path / "s000010", 1 << 50)


def test_sizes_for_people() -> None:
    assert [readable_size(size) for size in (0, 1023, 1024, 3 << 29, 1 << 52)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 GiB",
        "4096.0 TiB",
    ]


def test_a_process_that_was_thought_dead_does_not_speak_for_the_run(begun: Run) -> None:
    older, newer = (StatusWriter(begun, "controller", attempt) for attempt in (1, 2))
    older.write("serving")
    newer.write("loading data")
    older.write("serving still")
    (process_status,) = read_process_statuses(begun)
    assert (process_status.attempt, process_status.state) == (2, "loading data")


def test_a_checkpoint_whose_score_is_yet_to_come_stays(run: Run) -> None:
    save(run, 10, 20, 30, 40)
    for step in (10, 20):
        write_text(run.eval_begun(step), "{}")
    evaluated = begun_evaluations(run)
    retire(run, Retention(2, metric="reward"), {}, unfenced, evaluated)
    assert names(run) == ["s000030", "s000040"], "a reward of training is there with its step"
    save(run, 10, 20)
    keep = Retention(2, metric="eval/all/avg_score")
    retire(run, keep, {}, unfenced, evaluated)
    assert names(run) == ["s000010", "s000020", "s000030", "s000040"]
    write_text(run.eval_summary(20), "{}")
    retire(run, keep, {20: 0.9}, unfenced, begun_evaluations(run))
    assert names(run) == ["s000010", "s000020", "s000030", "s000040"], "the first one may still be better"
    write_text(run.eval_summary(10), "{}")
    retire(run, keep, {10: 0.5, 20: 0.9}, unfenced, begun_evaluations(run))
    assert names(run) == ["s000020", "s000030", "s000040"]
