"""Folders of a run on another filesystem: what is committed there is complete or absent, and where they are lost nothing begins again."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from hpcrl.config.sections.slurm import SlurmConfig
from hpcrl.config.validate import build
from hpcrl.errors import CommitError, DataError, RunError
from hpcrl.rundir.checkpoints import (
    Retention,
    find_checkpoint,
    line_of,
    newest_usable,
    note_committed,
    require_checkpoints,
    retire,
    samples_removed,
)
from hpcrl.rundir.commit import unfenced, verify
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import open_attempt, report_outcome
from hpcrl.rundir.other_roots import lost_folders, make_folders, places_of, require_folders, run_of
from hpcrl.rundir.space import explained
from hpcrl.rundir.starts import note
from tests.rundir.test_checkpoints import NEW, POINTS, dies, save, start


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """A directory on another filesystem than the run's."""
    with TemporaryDirectory(dir="/dev/shm") as directory:
        assert os.stat(directory).st_dev != tmp_path.stat().st_dev
        yield Path(directory) / "made"


def slurm(**roots: Path) -> SlurmConfig:
    return build(SlurmConfig, {name: str(root) for name, root in roots.items()})


def made(path: Path, settings: SlurmConfig) -> Run:
    run = Run(path)
    run.path.mkdir(parents=True)
    make_folders(run, run, settings, [])
    return run


@pytest.fixture
def run(tmp_path: Path, scratch: Path) -> Run:
    return made(tmp_path / "runs" / "project" / "mine", slurm(checkpoint_root=scratch, tensorboard_root=scratch))


def test_a_run_has_folders_of_its_own_below_each_root(tmp_path: Path, scratch: Path, run: Run) -> None:
    home = scratch / "project" / "mine"
    assert run.elsewhere == {run.checkpoints: home / "checkpoints", run.tensorboard: home / "tensorboard"}
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert run_of(home / "checkpoints" / "s000040") == run_of(run.checkpoint(40)) == run
    taken = slurm(export_root=scratch)
    with pytest.raises(RunError, match=f"mine exists, of the run {run.path}; choose another trainer.run_name"):
        made(tmp_path / "other" / "project" / "mine", taken)
    assert os.listdir(tmp_path / "other" / "project" / "mine") == []
    assert made(tmp_path / "other" / "project" / "yours", taken).elsewhere, "by another name"
    same = slurm(checkpoint_root=tmp_path / "runs" / ".." / "runs")
    assert places_of(run, same) == {}, "a root that is slurm.root changes nothing"


@pytest.mark.parametrize("retention", [Retention(2), Retention()], ids=["newest 2", "all"])
def test_killed_at_each_point(tmp_path: Path, scratch: Path, retention: Retention) -> None:
    for point in POINTS:
        run = made(tmp_path / "runs" / "project" / point, slurm(checkpoint_root=scratch))
        save(run, 10, 20, 30)

        def work(run: Run = run) -> None:
            save(run, 40, attempt=2)
            retire(run, retention, {}, unfenced)

        assert dies(f"checkpoints.{point}" if point != "retire" else "commit.retire", work) or retention.newest < 0
        found, _ = start(run, 3)
        assert found == run.checkpoint(40 if point in NEW else 30), point
        save(run, 50, attempt=3)
        retire(run, retention, {}, unfenced)
        assert verify(line_of(run)[-1])["attempt"] == 3
        names = sorted(path.name for path in (scratch / "project" / point / "checkpoints").iterdir())
        assert all(name == "starts.jsonl" or name[0] == "s" for name in names), "leftovers are gone there"
        assert not [path for path in run.path.iterdir() if not path.is_symlink()], (
            "nothing of them is in the run directory"
        )


def unmounted(run: Run) -> None:
    shutil.rmtree(run.elsewhere[run.checkpoints].parents[2])


def purged(run: Run) -> None:
    for path in run.checkpoints.rglob("*"):
        if path.is_file():
            path.unlink()


def emptied(run: Run) -> None:
    unmounted(run)
    run.elsewhere[run.checkpoints].mkdir(parents=True)


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (unmounted, "checkpoints leads to .*mine/checkpoints, which is not there on .* submit a new run"),
        (purged, "mine/checkpoints holds none any more, so training would restart from step 0"),
        (emptied, "mine/checkpoints holds none any more, so training would restart from step 0"),
    ],
)
def test_a_run_does_not_begin_again_without_its_checkpoints(run: Run, loss: Callable[[Run], None], told: str) -> None:
    """Its attempt ends without knowing a step, because the filesystem was gone at the end already."""
    open_attempt(run, "7.0", ["n1"])
    note(run, {"attempt": 1, "from": None})
    save(run, 10, 20)
    note_committed(run, 1, 20)
    require_checkpoints(run)
    loss(run)
    assert report_outcome(run, 1, "failed", "the filesystem", "agent-0").step == 0
    with pytest.raises(DataError, match=f"^mine had a checkpoint of step 20, and .*{told}"):
        require_checkpoints(run)
    assert samples_removed(run) == 0


def test_readers_name_the_folder_that_is_lost(run: Run) -> None:
    save(run, 10)
    unmounted(run)
    readers: list[Callable[[], object]] = [
        lambda: line_of(run),
        lambda: find_checkpoint(run, "10"),
        lambda: newest_usable(run, 2, print),
        lambda: require_folders(run),
    ]
    for read in readers:
        with pytest.raises(DataError, match=r"checkpoints leads to .* which is not there"):
            read()
    assert set(lost_folders(run)) == {run.checkpoints, run.tensorboard}
    expected = f"could not be written: {run.checkpoints} leads to .*, which is not there"
    with pytest.raises(CommitError, match=expected), explained(run.checkpoint(20)):
        save(run, 20)
    assert not run.elsewhere[run.checkpoints].parents[2].exists(), "nothing makes it again"


def test_a_copied_and_a_moved_run(tmp_path: Path, run: Run) -> None:
    copy = Run(tmp_path / "copy")
    shutil.copytree(run.path, copy.path, symlinks=True)
    with pytest.raises(DataError, match=f"belongs to {run.path}, and a copy of a run cannot go on beside it"):
        require_folders(copy, copy.checkpoints)
    shutil.rmtree(run.path)
    (remedy,) = {sentence.rpartition("If the run was moved: ")[2] for sentence in lost_folders(copy).values()}
    assert os.system(remedy) == 0
    require_folders(copy)
