"""Roots of all users: what one of them closes hides nothing of the others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpcrl.config.sections.slurm import SlurmConfig
from hpcrl.config.validate import build
from hpcrl.launch.manage.registry import all_runs
from hpcrl.launch.manage.remove import sizes_of
from hpcrl.launch.manage.users import roots_of
from hpcrl.rundir.commit import write_text
from hpcrl.rundir.layout import Run
from hpcrl.rundir.other_roots import make_folders, own_homes

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be somebody else")


@contextmanager
def somebody_else() -> Iterator[None]:
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def homes(tmp_path: Path) -> Path:
    """A folder of homes, one with a run, that all may enter, as those above it."""
    run = Run(tmp_path / "homes" / "ann" / "runs" / "p" / "open")
    write_text(run.config, "")
    for folder in [*run.path.parents, run.path]:
        if tmp_path in (folder, *folder.parents):
            folder.chmod(0o755)
    for folder in tmp_path.parents[:3]:
        if folder != Path("/tmp"):
            folder.chmod(0o755)
    return tmp_path / "homes"


def test_a_link_into_a_closed_directory_is_passed_over(homes: Path) -> None:
    root = homes / "ann" / "runs"
    (homes / "eve" / "closed" / "inside").mkdir(parents=True)
    (homes / "eve" / "closed").chmod(0o700)
    for link in (homes / "bob", homes / "eve" / "runs", root / "link", root / "p" / "link"):
        link.symlink_to(homes / "eve" / "closed" / "inside")
    with somebody_else():
        assert roots_of(homes / "*" / "runs") == ([root], [])
        assert [run.name for run in all_runs(root)] == ["open"]


def test_only_a_directory_whose_names_are_matched_must_be_readable(homes: Path) -> None:
    homes.parent.chmod(0o711)
    with somebody_else():
        assert roots_of(homes / "*" / "runs") == ([homes / "ann" / "runs"], [])
    homes.chmod(0o711)
    with somebody_else():
        assert roots_of(homes / "*" / "runs") == ([], [homes])


def test_sizes_of_a_run_of_somebody_else(homes: Path) -> None:
    """Checkpoints below another root count where they may be read, and a closed root ends no list."""
    run, scratch = Run(homes / "ann" / "runs" / "p" / "open"), homes / "scratch"
    make_folders(run, run, build(SlurmConfig, {"checkpoint_root": str(scratch)}), [])
    write_text(run.checkpoints / "s000001" / "part", "x" * 3000)
    for folder in (scratch, scratch / "p", scratch / "p" / "open", run.checkpoints / "s000001"):
        folder.chmod(0o755)
        os.chown(folder, 1, 1)
    with somebody_else():
        assert sizes_of(run)["checkpoints"] == 3000
        assert own_homes(run) == [], "what is deleted is of this user"
    (run.checkpoints / "s000001").chmod(0o744)
    with somebody_else():
        assert "checkpoints" not in sizes_of(run)
    (scratch / "p" / "open").chmod(0o700)
    with somebody_else():
        assert "checkpoints" not in sizes_of(run)
