"""Roots of all users: what one of them closes hides nothing of the others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpcrl.launch.manage.registry import all_runs
from hpcrl.launch.manage.users import roots_of
from hpcrl.rundir.commit import write_text
from hpcrl.rundir.layout import Run

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
