"""Runs that a group may read: modes and groups of files, and what is refused."""

from __future__ import annotations

import grp
import os
from pathlib import Path

import pytest

from hpcrl.errors import RunError
from hpcrl.launch.sharing import check_group, closed_above, made_for, share, umask_of, writing_for

GROUP = grp.getgrgid(1 if os.geteuid() == 0 else os.getegid())


def mode(path: Path) -> str:
    return f"{path.stat().st_mode & 0o7777:o}"


def test_a_folder_is_given_to_a_group_and_taken_back(tmp_path: Path) -> None:
    run, token = tmp_path / "run", tmp_path / "run" / "secrets" / "token"
    (run / "logs").mkdir(parents=True)
    run.chmod(0o700)
    token.parent.mkdir(mode=0o700)
    for path, bits in ((token, 0o600), (run / "config.toml", 0o600), (run / "script", 0o700)):
        path.touch()
        path.chmod(bits)
    (run / "link").symlink_to(token)
    share(run, GROUP.gr_name)
    with writing_for(GROUP.gr_name):
        (run / "logs" / "new").touch()
        (run / "logs" / "folder").mkdir()
    names = ("", "config.toml", "script", "logs/new", "logs/folder")
    assert [mode(run / name) for name in names] == ["2750", "640", "750", "640", "2750"]
    assert {(run / name).stat().st_gid for name in names} == {GROUP.gr_gid}
    assert (mode(token.parent), mode(token)) == ("700", "600")
    share(run, None)
    assert [mode(run / name) for name in names] == ["700", "600", "700", "600", "700"]
    assert umask_of(None) == 0o077


def test_a_folder_of_a_command_is_made_for_the_group(tmp_path: Path) -> None:
    """As `hpcrl eval`, `rescore` and `score` make theirs."""
    place = tmp_path / "evaluations" / "s000004"
    with made_for(GROUP.gr_name, place):
        (place / "secrets").mkdir(mode=0o700)
        (place / "logs" / "0").mkdir(parents=True)
        (place / "results.json").touch()
    names = ("..", "", "secrets", "logs", "logs/0", "results.json")
    assert [mode(place / name)[-3:] for name in names] == ["750", "750", "700", "750", "750", "640"]
    assert {(place / name).stat().st_gid for name in names[1:]} == {GROUP.gr_gid}
    with made_for(None, tmp_path / "own"):
        pass
    assert mode(tmp_path / "own") == "700"


def test_a_folder_of_a_command_is_private_where_the_group_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with made_for("no-such-group", tmp_path / "x"):
        (tmp_path / "x" / "results.json").touch()
    assert "there is no group no-such-group here" in (said := capsys.readouterr().err)
    assert f"Only you can read {tmp_path / 'x'}" in said
    assert mode(tmp_path / "x") == "700"
    with pytest.raises(RunError, match="judge"), made_for(None, tmp_path / "empty"):
        raise RunError("no judge")
    assert not (tmp_path / "empty").exists()


def test_only_a_group_that_is_there_may_be_named() -> None:
    assert list(check_group(GROUP.gr_name)) == []
    (problem,) = check_group("no-such-group")
    assert problem.path == "slurm.readable_by"
    assert "`id -Gn` lists yours: " in problem.message


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be somebody else")
def test_a_group_of_others_is_refused() -> None:
    os.seteuid(65534)
    try:
        (problem,) = check_group(grp.getgrgid(3).gr_name)
    finally:
        os.seteuid(0)
    assert "you are not in the group" in problem.message


def test_closed_directories_above_are_found(tmp_path: Path) -> None:
    folder = tmp_path / "closed" / "open" / "run"
    folder.mkdir(parents=True)
    folder.parents[0].chmod(0o755)
    folder.parents[1].chmod(0o700)
    assert folder.parents[1] in closed_above(folder, GROUP.gr_name)
    assert folder.parents[0] not in closed_above(folder, GROUP.gr_name)
